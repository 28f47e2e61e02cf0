"""Text of speech as its tokens come: no times in it, and the same as the segments' texts together, however it is cut."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from frontend_samples import byte_level
from hypothesis import given, settings
from hypothesis import strategies as st
from pagoda.serving.frontend.speech import SpeechTokens, SpokenText
from pagoda.serving.frontend.tokenizer import Tokenizer, load_folder


@cache
def tokenizer() -> Tokenizer:
    made = byte_level()
    made.add_special_tokens([f"<|{name}|>" for name in ("startoftranscript", "en", "transcribe", "notimestamps")])
    made.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(51)])
    with TemporaryDirectory() as folder:
        made.save(f"{folder}/tokenizer.json")
        return load_folder(Path(folder))


@settings(deadline=None)
@given(st.data())
def test_the_pieces_are_the_segments(data: st.DataObject) -> None:
    known = tokenizer()
    tokens = SpeechTokens.of(known)
    assert tokens.first_time is not None
    ids = data.draw(st.lists(st.integers(5, tokens.start - 1) | st.integers(tokens.first_time, tokens.first_time + 50), max_size=20))
    spoken, said, at = SpokenText(tokens, known), "", 0
    while at < len(ids):
        step = data.draw(st.integers(1, 5))
        said += spoken.push(ids[at : at + step])
        at += step
    said += spoken.flush()
    assert said == "".join(known.decode(part.tokens) for part in tokens.segments(ids, 1.0))
    assert "<|" not in said or any("<|" in known.decode([one]) for one in ids if one < tokens.start)
