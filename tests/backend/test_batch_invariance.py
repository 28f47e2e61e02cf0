"""`batch_invariant`: tokens and logprobs of a request are the same to the bit alone and in any company, in any chunks, with prefix hits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagoda.hal.discovery import INSTRUMENTS, find, find_all
from pagoda.hal.errors import ModelError
from pagoda.serving.engine.build import engine_starter, start_engine
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams
from tiny_checkpoints import make

DEVICES = [one.name for one in find_all() if one.probe.available and one.name not in INSTRUMENTS]
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 16},
    "Mistral": {"sliding_window": 20},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
RECURRENT: dict[str, dict[str, Any]] = {"Mamba2": {"state_size": 6, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}}
if any(kernel.op == "ssd_scan" and "batch_invariant" in kernel.claims for kernel in find(DEVICES[0]).kernels()):
    FAMILIES |= RECURRENT
BEGINNING = tuple(range(20, 68))
KINDS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.8, "seed": 4, "top_p": 0.9})


class Asked(NamedTuple):
    """A request: how much of the common beginning it has, what follows, how many tokens it wants, how they are drawn."""

    shared: int
    rest: tuple[int, ...]
    tokens: int
    kind: int

    def request(self, name: str) -> EngineRequest:
        drawn = SamplingParams(max_tokens=self.tokens, ignore_eos=True, logprobs=3, **KINDS[self.kind])
        return EngineRequest(name, (*BEGINNING[: self.shared], *self.rest), drawn)


asked = st.builds(
    Asked,
    st.sampled_from((0, 16, 17, 33, 48)),
    st.lists(st.integers(20, 90), min_size=1, max_size=40).map(tuple),
    st.integers(1, 12),
    st.integers(0, len(KINDS) - 1),
)


class Served:
    """An engine that runs several requests at a time, and a counter of their names."""

    def __init__(self, config: EngineConfig) -> None:
        self._loop, self._count = asyncio.new_event_loop(), 0
        self._client = self._loop.run_until_complete(InProcessClient.start(engine_starter(config)))

    def answers(self, together: list[Asked]) -> list[list[Any]]:
        """Of each its tokens, with all numbers that came with them."""
        return self._loop.run_until_complete(self._all(together))

    async def _all(self, together: list[Asked]) -> list[list[Any]]:
        return await asyncio.gather(*map(self._one, together))

    async def _one(self, one: Asked) -> list[Any]:
        self._count += 1
        parts = [part async for delta in self._client.generate(one.request(f"r{self._count}")) for part in delta.sequences]
        entries = [entry for part in parts for entry in part.logprobs or ()]
        return [(entry.token_id, entry.logprob, tuple(entry.top_ids), tuple(entry.top_logprobs)) for entry in entries]

    def close(self) -> None:
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


@pytest.fixture(scope="module", params=[(family, dtype) for family in FAMILIES for dtype in ("bfloat16", "float32")], ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    family, dtype = request.param
    path = tmp_path_factory.mktemp(family)
    make(path, family, **FAMILIES[family])
    config = EngineConfig(
        model=str(path), device=DEVICES[0], dtype=dtype, batch_invariant=True, max_num_seqs=8, max_num_batched_tokens=24, max_model_len=128,
        num_gpu_blocks_override=48, block_size=16, use_tqdm_on_load=False,
    )  # fmt: skip
    engine = Served(config)
    yield engine
    engine.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(one=asked, company=st.lists(asked, min_size=1, max_size=9), place=st.integers(0, 9))
def test_answers_do_not_depend_on_company(served: Served, one: Asked, company: list[Asked], place: int) -> None:
    (alone,) = served.answers([one])
    place = min(place, len(company))
    crowded = served.answers([*company[:place], one, *company[place:]])[place]
    assert len(alone) == one.tokens
    assert crowded == alone


def test_a_model_without_such_kernels_is_refused_by_the_primitive(tmp_path: Path) -> None:
    make(tmp_path, "Mamba2", **RECURRENT["Mamba2"])
    config = EngineConfig(model=str(tmp_path), device="cpu", batch_invariant=True, num_gpu_blocks_override=48)
    with pytest.raises(ModelError, match=r"--batch-invariant.*causal_conv1d|--batch-invariant.*ssd_scan"):
        start_engine(config, lambda deltas: None)  # type: ignore[arg-type]
