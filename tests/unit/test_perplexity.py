"""`pagoda bench perplexity` against transformers on a tiny checkpoint, and its windows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from frontend_samples import byte_level
from hypothesis import given
from hypothesis import strategies as st
from pagoda.serving.cli.bench.perplexity import windows
from pagoda.serving.cli.main import main
from tiny_checkpoints import make

TEXT = "The capital of France is Paris, isn't it? The quick brown fox jumps over the lazy dog. def main(argv): return {'a': 1}\n" * 4


@given(st.integers(2, 200), st.integers(2, 50), st.integers(1, 50))
def test_every_token_counts_once_and_sees_what_its_window_holds(count: int, window: int, stride: int) -> None:
    stride = min(stride, window)
    planned = list(windows(count, window, stride))
    scored = [at for one in planned for at in range(one.scored, one.end)]
    alone = set(range(0, count, window)) if stride == window else {0}
    assert scored == [at for at in range(count) if at not in alone]
    assert all(one.begin < one.scored < one.end <= one.begin + window for one in planned)
    # all but the first window's tokens have at least `window - stride` before them
    assert all(one.scored - one.begin >= window - stride for one in planned[1:] if one.end < count)


@torch.no_grad()
def reference(model: torch.nn.Module, ids: list[int], window: int, stride: int) -> float:
    """The sliding window of transformers' own guide: labels of what was scored before are masked, the model shifts them."""
    total, count, before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + window, len(ids))
        here = torch.tensor([ids[begin:end]])
        labels = here.clone()
        labels[:, : here.shape[1] - (end - before)] = -100
        kept = int((labels[:, 1:] != -100).sum())
        if kept:
            total += float(model(here, labels=labels).loss) * kept
            count += kept
        before = end
        if end == len(ids):
            break
    return math.exp(total / count)


@pytest.mark.parametrize(("window", "stride"), [(64, 64), (64, 16), (50, 7)])
def test_perplexity_is_that_of_transformers(tmp_path: Path, window: int, stride: int, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = byte_level()
    folder = tmp_path / "model"
    model = make(folder, "Llama", vocab_size=tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=1, pad_token_id=2)
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "text").write_text(TEXT)
    words = [str(folder), "--text", str(tmp_path / "text"), "--window", str(window), "--stride", str(stride), "--json", "-"]
    assert main(["bench", "perplexity", *words, "--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "8M"]) == 0
    found = json.loads(capsys.readouterr().out)
    ids = tokenizer.encode(TEXT).ids
    assert found["tokens"] == len(ids)
    assert found["perplexity"] == pytest.approx(reference(model, ids, window, stride), rel=2e-5)
    assert found["bits_per_byte"] * len(TEXT.encode()) == pytest.approx(found["nats_per_token"] / math.log(2) * found["scored"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs a text"),
        (["--text", "/no/such"], "No such file"),
        (["--text", "x", "--window", "1"], "must be at least 2"),
        (["--text", "x", "--window", "8", "--stride", "9"], "leaves tokens out"),
    ],
)
def test_what_cannot_work_is_told_before_a_model_loads(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "perplexity", *words]) == 2
    assert message in capsys.readouterr().err
