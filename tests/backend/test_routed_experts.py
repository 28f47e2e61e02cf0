"""The experts that each layer chose reach the step's result: transformers' choice, of the rows that ask, in any chunks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from pagoda.hal.comm import Topology
from pagoda.serving.engine.build import build_runner
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.params import SamplingParams
from plans import Hand
from tiny_checkpoints import make

PROMPT = [5, 17, 80, 3, 44, 9, 61, 2, 33]


def test_rows_that_ask_get_the_experts_of_their_tokens(tmp_path: Path) -> None:
    model = make(tmp_path, "Mixtral", num_local_experts=6, num_experts_per_tok=2, max_position_embeddings=512)
    config = EngineConfig(model=str(tmp_path), device="cpu", max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks_override=200)
    hand = Hand(build_runner(config, Topology(0, 1)))
    asking, other, plain = (hand.sequence(slot, PROMPT, SamplingParams(temperature=0, max_tokens=64)) for slot in range(3))
    answer = hand.generate(plain, 6)
    found = []
    for count in (4, 3, 2, 1, 1, 1):
        mates = [(other, 1)] if count > 1 else []
        result = hand.run((asking, count), *mates, routed=np.array([True] + [False] * len(mates)))
        assert list(result.experts) == [0]
        found.append(result.experts[0])
    assert asking.output == answer[:4]
    got = np.concatenate(found, axis=1)
    tokens = torch.tensor([[*PROMPT, *answer[:3]]])
    with torch.no_grad():
        routers = model(tokens, output_router_logits=True, use_cache=False).router_logits
    wanted = np.stack([layer.topk(2).indices.numpy() for layer in routers])
    assert got.shape == wanted.shape == (2, 12, 2)
    assert (np.sort(got, axis=-1) == np.sort(wanted, axis=-1)).all()
    assert hand.run((plain, 1)).experts == {}
