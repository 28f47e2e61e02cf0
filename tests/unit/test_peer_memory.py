"""Whether GPUs of a group share memory: all ranks answer alike, whichever of them lacks something."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from pagoda.backends.cuda import peer_memory
from pagoda.backends.cuda.peer_memory import Offer, unreachable
from pagoda.hal.comm import Topology

DEVICE = torch.device("cuda", 0)
MINE = Offer("host", "gpu", (0, b"handle"))


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (MINE, ""),
        (MINE._replace(host="another"), "another host"),
        (MINE._replace(handle=()), "cannot be shared"),
        (MINE._replace(gpu="hidden"), "GPU hidden is not visible"),
    ],
)
def test_what_kernels_reach(other: Offer, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = unreachable(MINE, other, DEVICE)
    assert reason in said and bool(said) == bool(reason)


@pytest.mark.parametrize("lacking", [set(), {0}, {2}, {0, 1}])
def test_all_ranks_agree(lacking: set[int]) -> None:
    store = torch.distributed.HashStore()

    def rank(number: int) -> object:
        lacks = f"rank {number} has no NVLink" if number in lacking else ""
        return peer_memory._agreed(store, Topology(number, 3), lacks, lambda: f"region of {number}")  # type: ignore[arg-type,return-value]

    with ThreadPoolExecutor(3) as ranks:
        answers = list(ranks.map(rank, range(3)))
    assert answers == ([None] * 3 if lacking else [f"region of {number}" for number in range(3)])
