"""From a prompt with media to token ids, items and positions, by transformers' own processor; runs where the frontend runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from pagoda.hal.errors import ConfigError, RequestError
from pagoda.models.loading.json_file import read_json
from pagoda.models.media import MediaItem, MediaPositions
from pagoda.serving.frontend.films import Film
from pagoda.serving.frontend.media_files import picture_of, sound_of, video_of
from pagoda.serving.frontend.sound import RATE

if TYPE_CHECKING:
    from pagoda.models.bridge.prompt import MediaReader

MEDIA = "multi_modal_data"
"""Key of a prompt mapping under which its media are: {"image": a picture or several, "video": …, "audio": …}, or {"processed": tensors}
with token ids."""

Read = tuple[list[int], tuple[MediaItem, ...], MediaPositions | None]


class ReadMedia(Protocol):
    """What makes ids, items and positions of a prompt and its media; see `MediaProcessor.__call__`."""

    def __call__(self, prompt: str | list[int], media: Mapping[str, Any], add_special_tokens: bool = True) -> Read: ...


class MediaProcessor:
    """Of the model in a folder. What it needs is loaded when the first picture comes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, prompt: str | list[int], media: Mapping[str, Any], add_special_tokens: bool = True) -> Read:
        """Ids with all placeholders, items and positions; `add_special_tokens` as tokenizers have it.

        Raises `RequestError` for what the model or its processor does not take.
        """
        unknown = sorted(set(media) - {"image", "video", "audio", "processed"})
        if unknown:
            raise RequestError(f"{MEDIA} has {', '.join(unknown)}; there are image, video and audio", param=MEDIA)
        if "processed" in media:
            if isinstance(prompt, str):
                raise RequestError("processed tensors go with prompt_token_ids that hold their placeholders", param=MEDIA)
            return (prompt, *self._reader.read(prompt, media["processed"]))
        return self._process(prompt, media, add_special_tokens)

    def _process(self, prompt: str | list[int], media: Mapping[str, Any], special: bool) -> Read:
        given: dict[str, Any] = {}
        if "image" in media:
            given["images"] = [picture_of(one) for one in _listed(media["image"])]
        if "video" in media:
            given |= _as_videos([video_of(one) for one in _videos(media["video"])])
        if "audio" in media:
            sounds = media["audio"]
            given["audio"] = [sound_of(one) for one in (sounds if isinstance(sounds, list) else [sounds])]
            given["sampling_rate"] = RATE
        try:
            processor, reader = self._processor, self._reader
        except ConfigError as error:  # a package that is missing here, most often
            raise RequestError(f"this server cannot read media: {error}", param=MEDIA, code="unsupported_content") from error
        if not isinstance(prompt, str):
            prompt = processor.tokenizer.decode(prompt)
        try:
            made = processor(text=[prompt], **given, return_tensors="pt", add_special_tokens=special)
            ids = made.pop("input_ids")[0].tolist()
            read: Read = (ids, *reader.read(ids, made))
        except RequestError:
            raise
        except Exception as error:  # whatever a processor raises is about what it was given
            raise RequestError(f"the model's processor refuses this prompt: {type(error).__name__}: {error}", param=MEDIA) from error
        for item in read[1]:
            _check_finite(item)
        return read

    @cached_property
    def _reader(self) -> MediaReader:
        made: MediaReader = _tools().MediaReader(read_json(self._folder / "config.json"))
        return made

    @cached_property
    def _processor(self) -> Any:
        return _tools().own_processor(self._folder)


def _tools() -> Any:
    """The module that knows transformers, which a process without pictures does not pay for."""
    return import_module("pagoda.models.bridge.prompt")


def _check_finite(item: MediaItem) -> None:
    for numbers in item.tensors.values():
        if numbers.dtype.startswith("float") and not np.isfinite(np.frombuffer(numbers.data, numbers.dtype)).all():
            raise RequestError(
                f"the model's processor makes numbers of this {item.modality} that are not finite; send another", param=MEDIA
            )


def _videos(given: Any) -> list[Any]:
    """Several videos, or one: a list of frames that are objects of this process is one."""
    several = isinstance(given, list | tuple) and all(isinstance(one, list | tuple | bytes | str) for one in given)
    return list(given) if several else [given]


def _as_videos(videos: list[Any]) -> dict[str, Any]:
    """As a processor takes them. Of films, which were sampled already, it is told when each picture was shown."""
    told = [one.metadata if isinstance(one, Film) else None for one in videos]
    pictures = [one.frames if isinstance(one, Film) else one for one in videos]
    return {"videos": pictures, **({"video_metadata": told, "do_sample_frames": False} if all(told) else {})}


def _listed(images: Any) -> list[Any]:
    return list(images) if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images]
