"""GraphPolicy buckets and the eager replay."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pagoda.backends.torch_host.graphs import EagerGraphs
from pagoda.hal.errors import DeviceError
from pagoda.hal.graphs import GraphPolicy


class Out(NamedTuple):
    total: torch.Tensor
    parts: dict[str, torch.Tensor]


@given(st.sets(st.integers(1, 512)), st.integers(0, 600))
def test_bucket_is_the_smallest_that_holds(sizes: set[int], wanted: int) -> None:
    policy = GraphPolicy("captured", tuple(sorted(sizes)), tuple(sorted(sizes)))
    holding = [size for size in sizes if size >= wanted]
    assert policy.token_bucket(wanted) == policy.row_bucket(wanted) == (min(holding) if holding else wanted)


def test_no_buckets_means_no_padding() -> None:
    assert GraphPolicy().token_bucket(17) == 17


def test_replay_sees_changed_inputs_and_keeps_its_outputs() -> None:
    x = torch.arange(4.0)
    replay = EagerGraphs().capture("k", lambda t: Out(t.sum(), {"double": t * 2}), (x,))
    first = replay()
    x.add_(1)
    second = replay()
    assert second is first
    assert second.total == 10
    assert torch.equal(second.parts["double"], torch.tensor([2.0, 4.0, 6.0, 8.0]))
    assert replay.nbytes == 4 + 16


def test_a_step_whose_shapes_change_is_refused() -> None:
    count = iter((1, 2))
    replay = EagerGraphs().capture("k", lambda t: t[: next(count)], (torch.zeros(3),))
    with pytest.raises(DeviceError, match="shapes must depend on its bucket alone"):
        replay()
