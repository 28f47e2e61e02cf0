"""Phi-4 multimodal: a native decoder behind the part of transformers' own model that sees and hears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pagoda.models.load import describe, open_checkpoint, support_of
from pagoda.models.rope import LongRopeScaling, Rope
from pagoda.models.spec import Attention, DecoderSpec
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.sdk import LLM
from tiny_checkpoints import make
from tiny_vision import greedy

IMAGE, SOUND, COUNT = 5, 6, 10
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 32, "patch_size": 4,
    "crop_size": 32, "image_token_id": IMAGE,
}  # fmt: skip
AUDIO = {
    "hidden_size": 32, "intermediate_size": 48, "num_blocks": 3, "num_attention_heads": 2, "ext_pw_out_channel": 32, "input_size": 16,
    "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8, "audio_token_id": SOUND,
}  # fmt: skip
ROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.0, 1.5, 2.5],
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, prompt_logprobs=0)
Inputs = dict[str, torch.Tensor]


def make_phi4(folder: Path) -> torch.nn.Module:
    values = {"rope_parameters": ROPE, "original_max_position_embeddings": 96, "hidden_size": 32, "head_dim": 8}
    return make(folder, "Phi4Multimodal", vision_config=VISION, audio_config=AUDIO, **values)


def images(count: int, seed: int = 0) -> tuple[list[int], Inputs]:
    """Pictures of one crop with its whole: 4 · 5 rows for each of both, and one between them."""
    draw = torch.Generator().manual_seed(seed)
    ids = [7, 9, *(token for i in range(count) for token in [*[IMAGE] * 41, 50 + i])]
    pixels = torch.randn(count, 2, 3, 32, 32, generator=draw)
    return ids, {
        "image_pixel_values": pixels,
        "image_sizes": torch.tensor([[32, 32]] * count),
        "image_attention_mask": torch.ones(count, 2, 8, 8),
    }


def sound(frames: int, seed: int = 0) -> tuple[list[int], Inputs]:
    """A row for every eight frames."""
    rows = -(-frames // 8)
    features = torch.randn(1, frames, 16, generator=torch.Generator().manual_seed(seed))
    return [11, *[SOUND] * rows, 60], {"audio_input_features": features, "audio_embed_sizes": torch.tensor([rows])}


def both() -> tuple[list[int], Inputs]:
    """What is heard beside an image goes through a projection of its own."""
    (seen, image), (heard, audio) = images(1, 5), sound(40, 5)
    return [*seen, *heard], image | audio


@torch.no_grad()
def likely(model: torch.nn.Module, ids: list[int], tensors: Inputs) -> torch.Tensor:
    """How likely each of the prompt's tokens but the first is to transformers."""
    rows = model(input_ids=torch.tensor([ids]), use_cache=False, **tensors).logits[0].log_softmax(-1)
    return rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def told(output: Any, ids: list[int]) -> torch.Tensor:
    return torch.tensor([row[token].logprob for row, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)])


@pytest.mark.parametrize("kind", ["image", "images", "sound", "both"])
def test_requests_are_answered_as_transformers_answers_them(kind: str, tmp_path: Path) -> None:
    model = make_phi4(tmp_path)
    assert support_of(open_checkpoint(tmp_path).config) == "native"
    asked = {"image": images(1), "images": images(2, 1), "sound": sound(44), "both": both()}[kind]
    ids, tensors = asked
    louder = {name: tensor * (-0.5 if name.endswith(("values", "features")) else 1) for name, tensor in tensors.items()}
    want = [(greedy(model, ids, given, COUNT), likely(model, ids, given)) for given in (tensors, louder)]
    assert (want[0][1] - want[1][1]).abs().max() > 0.1, "what is seen and heard is to matter"
    settings = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 8 << 20, "skip_tokenizer_init": True}
    with LLM(str(tmp_path), device="cpu", max_num_batched_tokens=32, **settings) as llm:
        assert llm.processor.facts.modalities == ("image", "audio")
        prompts = [{"prompt_token_ids": ids, "multi_modal_data": {"processed": given}} for given in (tensors, louder)]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for output, (tokens, rows) in zip(outputs, want, strict=True):
        assert list(output.outputs[0].token_ids) == tokens
        assert torch.allclose(told(output, ids), rows, atol=1e-3)


def test_the_decoder_is_phi_3s_with_its_own_rotation(tmp_path: Path) -> None:
    make_phi4(tmp_path)
    description = describe(open_checkpoint(tmp_path), model_impl="pagoda")
    assert description.sees is not None and isinstance(description.spec, DecoderSpec)
    for layer in description.spec.layers:
        assert isinstance(layer.mixer, Attention) and isinstance(layer.mixer.position, Rope)
        assert layer.mixer.position.dims == 6 and isinstance(layer.mixer.position.scaling, LongRopeScaling)
    assert not any("extend" in name for name in description.stored)
