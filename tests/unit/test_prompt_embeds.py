"""Prompts of embeddings: those of token ids are answered as the ids are, in any steps and company; files are read with care."""

from __future__ import annotations

import base64
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagoda.hal.errors import ConfigError, RequestError
from pagoda.models.media_tensors import array_of
from pagoda.serving.engine.params import SamplingParams
from pagoda.serving.frontend.prompt_embeds import cut, items_of, rows_of_bytes, rows_of_text
from pagoda.serving.sdk import LLM
from safetensors.torch import save as safetensors
from tiny_checkpoints import make
from tiny_vision import inputs, make_vision
from toy_server import toy_server

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
WIDTH, MOST = 6, 50


def saved(given: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(given, stream)
    return stream.getvalue()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", [saved, lambda tensor: safetensors({"any": tensor.contiguous()})], ids=["torch", "safetensors"])
def test_rows_are_read_as_they_were_written(dtype: torch.dtype, form: Any) -> None:
    rows = torch.randn(2 * WIDTH, 9, dtype=dtype).t()[:, ::2]  # of other strides
    for given in (rows, rows[None]):
        read = rows_of_text(base64.b64encode(form(given)).decode(), WIDTH, MOST)
        assert torch.equal(torch.from_numpy(array_of(read).copy()).float(), rows.float())


class Evil:
    """What pickle would run."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def compressed(blob: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(blob)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for part in old.infolist():
            new.writestr(part.filename, old.read(part))
    return out.getvalue()


ROWS = torch.ones(3, WIDTH)
WRONG: dict[str, tuple[Any, str]] = {
    "integers": (lambda: saved(ROWS.long()), "is of int64"),
    "doubles": (lambda: saved(ROWS.double()), "is of float64"),
    "width": (lambda: saved(torch.ones(3, WIDTH + 1)), f"must be \\[tokens, {WIDTH}\\]"),
    "vector": (lambda: saved(torch.ones(WIDTH)), "has the shape"),
    "batch": (lambda: saved(torch.ones(2, 3, WIDTH)), "has the shape"),
    "no row": (lambda: saved(torch.ones(0, WIDTH)), "has no row"),
    "no row of safetensors": (lambda: safetensors({"a": torch.ones(0, WIDTH)}), "has no row"),
    "many rows of few bytes": (lambda: saved(torch.ones(1, WIDTH).expand(1 << 40, WIDTH)), "at most 50"),
    "not finite": (lambda: saved(torch.full((1, WIDTH), float("nan"))), "not finite"),
    "infinite": (lambda: saved(torch.full((1, WIDTH), float("inf"))), "not finite"),
    "sparse": (lambda: saved(ROWS.to_sparse()), "cannot be read|layout torch.sparse"),
    "list": (lambda: saved([ROWS]), "holds a list"),
    "mapping": (lambda: saved({"a": ROWS}), "holds a dict"),
    "compressed": (lambda: compressed(saved(torch.zeros(1 << 12, 1 << 10))), "compressed"),
    "cut off": (lambda: saved(ROWS)[:-90], "cannot be read"),
    "nothing": (lambda: b"", "neither"),
    "noise": (lambda: bytes(range(256)), "neither"),
    "old pickle": (lambda: b"\x80\x02}q\x00.", "neither"),
    "two of safetensors": (lambda: safetensors({"a": ROWS, "b": ROWS.clone()}), "neither"),
    "integers of safetensors": (lambda: safetensors({"a": ROWS.long()}), "neither"),
    "cut off safetensors": (lambda: safetensors({"a": ROWS})[:-4], "does not fit"),
    "long header": (lambda: (1 << 60).to_bytes(8, "little") + b"{}", "neither"),
    "offsets": (lambda: _header('{"a":{"dtype":"F32","shape":[1,6],"data_offsets":[-24,0]}}'), "does not fit"),
    "shape": (lambda: _header('{"a":{"dtype":"F32","shape":[-1,-6],"data_offsets":[0,24]}}'), "does not fit"),
    "nesting": (lambda: _header("[" * 5000), "neither"),
}


def _header(text: str) -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + bytes(24)


@pytest.mark.parametrize("name", WRONG)
def test_other_files_are_refused_with_what_is_wrong(name: str) -> None:
    made, why = WRONG[name]
    with pytest.raises(RequestError, match=why) as told:
        rows_of_bytes(made(), WIDTH, MOST)
    assert told.value.param == "prompt_embeds"


def test_no_pickle_is_run(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        rows_of_bytes(saved(Evil(tmp_path / "ran")), WIDTH, MOST)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(RequestError, match="no base64"):
        rows_of_text("AAA*", WIDTH, MOST)


def test_items_are_pages_and_equal_ones_have_equal_digests() -> None:
    rows = rows_of_bytes(saved(torch.arange(40.0).repeat(WIDTH, 1).t()), WIDTH, MOST)
    items = items_of(rows, 16)
    assert [(item.offset, item.length) for item in items] == [(0, 16), (16, 16), (32, 8)]
    assert len({item.digest for item in items}) == 3
    assert next(item.digest for item in items_of(cut(rows, range(16, 40)), 16)) == items[1].digest
    assert np.array_equal(array_of(items[2].tensors["embeds"]), array_of(rows)[32:])


def engine(folder: Path, **options: Any) -> LLM:
    settings = {"dtype": "float32", "max_model_len": 96, "kv_cache_memory_bytes": 64 << 20, "skip_tokenizer_init": True, **options}
    return LLM(str(folder), device="cpu", enable_prompt_embeds=True, **settings)


def answers(llm: LLM, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False)]


@torch.no_grad()
def embedded(model: torch.nn.Module, ids: list[int]) -> dict[str, torch.Tensor]:
    return {"prompt_embeds": model.get_input_embeddings()(torch.tensor(ids))}


KINDS = ("Llama", "Qwen3Moe", "Gemma", "Gemma3", "OPT", "DeepseekV3", "FalconH1")


@pytest.mark.parametrize("graphs", ["full", "none"])
@pytest.mark.parametrize("name", KINDS)
def test_embeddings_of_ids_are_answered_as_the_ids(name: str, graphs: str, tmp_path: Path) -> None:
    model = make(tmp_path, name)
    prompts = [[(7 * k + 3 * row) % 60 + 3 for k in range(length)] for row, length in enumerate((1, 19, 50))]
    with engine(tmp_path, graphs=graphs, max_num_batched_tokens=24, enable_prefix_caching=False) as llm:
        want = answers(llm, prompts)
        assert len({tuple(one) for one in want}) == 3
        mixed = [embedded(model, prompts[0]), {"prompt_token_ids": prompts[1]}, embedded(model, prompts[2]), prompts[0], prompts[2]]
        assert answers(llm, mixed) == [want[0], want[1], want[2], want[0], want[2]]


@pytest.mark.parametrize("name", ["Qwen2VL", "Gemma3"])
def test_beside_images(name: str, tmp_path: Path) -> None:
    """Where positions have several axes, and where images are seen in both directions."""
    model = make_vision(tmp_path, name)
    text = [(7 * k) % 40 + 50 for k in range(40)]
    ids, tensors = inputs(name, 1)
    seen = {"prompt_token_ids": ids, "multi_modal_data": {"processed": tensors}}
    with engine(tmp_path, max_num_batched_tokens=24) as llm:
        want = answers(llm, [text, seen])
        assert answers(llm, [embedded(model, text), seen, embedded(model, text)]) == [*want, want[0]]


def test_equal_beginnings_share_pages_and_others_do_not(tmp_path: Path) -> None:
    model = make(tmp_path, "Llama")
    ids = [(7 * k) % 60 + 3 for k in range(70)]
    other = [*ids[:40], *reversed(ids[40:])]
    with engine(tmp_path, block_size=16) as llm:
        want = answers(llm, [ids, other])
        before = llm.stats().prefix_hits
        assert answers(llm, [embedded(model, ids)]) == want[:1]
        assert llm.stats().prefix_hits == before, "pages of tokens are not those of embeddings"
        assert answers(llm, [embedded(model, ids)]) == want[:1]
        assert llm.stats().prefix_hits == before + 64
        assert answers(llm, [embedded(model, other)]) == want[1:]
        assert llm.stats().prefix_hits == before + 64 + 32
        assert answers(llm, [{"prompt_token_ids": [0] * 70}]) != want[:1], "nor those of what stands in their place"


def test_penalties_and_several_answers_know_no_placeholder(tmp_path: Path) -> None:
    model = make(tmp_path, "Llama")
    ids = [(7 * k) % 60 + 3 for k in range(20)]
    with engine(tmp_path) as llm:
        free = next(token for token in range(256) if token not in ids and token)
        few: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "ignore_eos": True, "allowed_token_ids": [0, free]}
        for penalty in (50.0, 0.02):
            told = answers(llm, [embedded(model, ids)], SamplingParams(**few, repetition_penalty=penalty))
            assert told == answers(llm, [ids], SamplingParams(**few))
        several = llm.generate([embedded(model, ids)], SamplingParams(n=3, temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        assert {tuple(one.token_ids) for one in several[0].outputs} == {tuple(answers(llm, [ids])[0][:4])}


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = make(tmp_path / "model", "Llama")
    with engine(tmp_path / "model") as llm:
        given = embedded(model, [5, 6, 7])
        for prompt, why in (({"prompt_embeds": given["prompt_embeds"][:, 1:]}, "the shape"), ({"prompt_embeds": [[1.0]]}, "holds a list")):
            with pytest.raises(RequestError, match=why):
                answers(llm, [prompt])
        with pytest.raises(RequestError, match="no tokens"):
            answers(llm, [given], SamplingParams(prompt_logprobs=1))
    wild = make(tmp_path / "wild", "GPT2LMHeadModel", n_embd=32, n_head=4, n_layer=2, n_positions=128, n_inner=48)
    with engine(tmp_path / "wild") as llm:
        with pytest.raises(RequestError, match="NaN of the embeddings"):
            answers(llm, [{"prompt_embeds": torch.full((3, 32), 3e38)}])
        assert answers(llm, [embedded(wild, [5, 6, 7])]) == answers(llm, [[5, 6, 7]])
    make(tmp_path / "pooler", "BertModel")
    with pytest.raises(ConfigError, match="answers with vectors"):
        engine(tmp_path / "pooler")
    plain = LLM(str(tmp_path / "model"), device="cpu", skip_tokenizer_init=True, dtype="float32", kv_cache_memory_bytes=8 << 20)
    with plain as llm, pytest.raises(RequestError, match="enable-prompt-embeds"):
        answers(llm, [given])


async def test_a_server_without_the_flag_says_so() -> None:
    async with toy_server() as toy:
        reply = await toy.complete(None, prompt_embeds=base64.b64encode(saved(ROWS)).decode())
        assert reply.status_code == 400 and "--enable-prompt-embeds" in reply.text
        assert reply.json()["error"]["param"] == "prompt_embeds"
        assert (await toy.complete("a", prompt_embeds="")).status_code == 200
