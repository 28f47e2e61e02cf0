"""`--graphs`: what is captured under each mode, what stays apart, and which devices refuse a mode by its name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from pagoda.backends.torch_host.graphs import EagerGraphs
from pagoda.hal.errors import ConfigError
from pagoda.hal.graphs import GraphPolicy, Pieces
from pagoda.hal.kernel import Kernel
from pagoda.hal.table import Choice
from pagoda.serving.engine.build import engine_starter
from pagoda.serving.engine.graph_mode import apart, policy_of
from pagoda.serving.engine.inprocess_client import InProcessClient
from tiny import tiny_config
from toy import toy_request

T = TypeVar("T")
CAPTURED = GraphPolicy("captured", (1, 2), (1, 2))


class Whole:
    """Graphs that know no pieces."""

    policy = CAPTURED

    def capture(self, *args: Any) -> Any:
        raise NotImplementedError


class Counting(EagerGraphs):
    """Graphs that count what is cut out."""

    cuts = 0

    def cut(self, work: Callable[[], T]) -> T:
        self.cuts += 1
        return work()


def test_modes_and_devices() -> None:
    graphs = EagerGraphs(CAPTURED)
    assert isinstance(graphs, Pieces) and not isinstance(Whole(), Pieces)
    assert policy_of("full", Whole(), "chip") is CAPTURED and policy_of("piecewise", graphs, "chip") is CAPTURED
    assert policy_of("none", Whole(), "chip").mode == "eager"
    with pytest.raises(ConfigError, match="--graphs piecewise: chip makes whole steps replayable"):
        policy_of("piecewise", Whole(), "chip")
    for policy in (GraphPolicy("captured", (1,), (1,), static_shapes=True), GraphPolicy("traced", (1,), (1,))):
        with pytest.raises(ConfigError, match="--graphs none: chip runs steps of fixed sizes"):
            policy_of("none", EagerGraphs(policy), "chip")


@pytest.mark.parametrize(("op", "claims", "cut"), [("gemm", {"capturable"}, 0), ("gemm", set(), 1), ("paged_attention", {"capturable"}, 1)])
def test_attention_and_what_cannot_be_captured_stay_apart(op: str, claims: set[str], cut: int) -> None:
    graphs = Counting(CAPTURED)
    seen: list[str] = []

    class Run:
        pack = plan = None
        facts = "facts"

        def run(self, x: int) -> int:
            return x + 1

    def log(choice: Choice, run: Any) -> Any:
        seen.append(choice.op)
        return run

    kernel = Kernel(op, "k", "nowhere:at_all", claims=frozenset(claims))
    run: Any = apart(graphs, log)(Choice(op, None, kernel), Run())  # type: ignore[arg-type]
    assert run.run(1) == 2 and graphs.cuts == cut and seen == [op] and run.facts == "facts"


@pytest.mark.parametrize("mode", ["piecewise", "full"])
async def test_an_engine_in_pieces(tmp_path: Path, mode: str) -> None:
    config = tiny_config(tmp_path, device="null:h200", num_gpu_blocks_override=None, graphs=mode)
    client = await InProcessClient.start(engine_starter(config))
    try:

        async def ask(number: int) -> list[int]:
            deltas = client.generate(toy_request(str(number), [5] * (3 + number), 6))
            return [token async for delta in deltas for sequence in delta.sequences for token in sequence.token_ids]

        assert await asyncio.gather(*map(ask, range(5))) == [[0] * 6] * 5
    finally:
        await client.close()


async def test_the_null_device_has_fixed_sizes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--graphs none: h200"):
        await InProcessClient.start(engine_starter(tiny_config(tmp_path, device="null:h200", graphs="none")))
