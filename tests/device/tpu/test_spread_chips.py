"""One program over the four chips of PJRT's CPU client gives the reference's tokens, in processes of their own: its mode cannot be left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import CONFIG

ASK = """
import asyncio, json, sys
from pagoda.serving.engine.build import engine_starter
from pagoda.serving.engine.config import EngineConfig
from pagoda.serving.engine.inprocess_client import InProcessClient
from pagoda.serving.engine.messages import EngineRequest
from pagoda.serving.engine.params import SamplingParams

async def main(model, device, chips):
    sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "num_gpu_blocks_override": 11}
    named = {"model": model, "device": device, "dtype": "float32", "load_format": "dummy", "tensor_parallel_size": chips}
    client = await InProcessClient.start(engine_starter(EngineConfig(**named, **sizes)))
    tokens = []
    for number, prompt in enumerate(([5, 17, 80, 3, 44, 9, 61, 200, 33, 70, 12, 8, 25], [90, 4, 6, 31])):
        request = EngineRequest(str(number), tuple(prompt), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        tokens.append([token async for delta in client.generate(request) for sequence in delta.sequences for token in sequence.token_ids])
    await client.close()
    print(json.dumps(tokens))

if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


def ask(folder: Path, device: str, chips: int) -> subprocess.CompletedProcess[str]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    simulated = {"PJRT_DEVICE": "CPU", "TPU_SKIP_MDS_QUERY": "1", "CPU_NUM_DEVICES": "4"}
    command = [sys.executable, "-c", ASK, str(folder), device, str(chips)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **simulated})


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_four_chips_give_the_references_tokens(tmp_path: Path) -> None:
    expected, spread = (ask(tmp_path, *where) for where in (("reference", 1), ("tpu", 4)))
    assert expected.returncode == 0 and json.loads(spread.stdout) == json.loads(expected.stdout), spread.stderr[-2000:]


PARTS = """
import torch
from pagoda.hal.device import Spread
from pagoda.hal.discovery import find
device = find("tpu").open_spread(0, 4)
spread = device.extension(Spread)
x, column, row = torch.randn(8, 64), torch.randn(256, 64), torch.randn(64, 256)
placed = [tensor.to(device.torch_device) for tensor in (x, column, row)]
for tensor, dim in zip(placed, (None, 0, 1)):
    spread.lay(tensor, dim)
out = torch.relu(placed[0] @ placed[1].T) @ placed[2].T
torch.testing.assert_close(out.cpu(), torch.relu(x @ column.T) @ row.T, atol=1e-3, rtol=1e-4)
raw = device.runtime._raw
print([raw._get_xla_sharding_spec(tensor) for tensor in placed])
print(device.info.memory_bytes // find("tpu").describe("pjrt-cpu").memory_bytes)
"""


def test_weights_lie_in_parts_and_a_wrong_count_is_refused(tmp_path: Path) -> None:
    simulated = {**os.environ, "PJRT_DEVICE": "CPU", "TPU_SKIP_MDS_QUERY": "1", "CPU_NUM_DEVICES": "4"}
    done = subprocess.run([sys.executable, "-c", PARTS], capture_output=True, text=True, env=simulated, check=True)
    laid, memory = done.stdout.splitlines()
    assert "devices=[4,1]" in laid and "devices=[1,4]" in laid and memory == "4"
    refused = ask(tmp_path, "tpu", 3)
    assert refused.returncode != 0 and "3 chips were asked for and the runtime sees 4" in refused.stderr


ONE_THEN_ALL = """
from pagoda.hal.discovery import find
from pagoda.hal.errors import DeviceError
backend = find("tpu")
for first, then in ((backend.open, lambda: backend.open_spread(0, 4)), (lambda: backend.open_spread(0, 4), backend.open))[ORDER:]:
    first()
    try:
        then()
    except DeviceError as error:
        print(error)
    break
"""


@pytest.mark.heavy
@pytest.mark.parametrize("order", [0, 1])
def test_a_process_is_of_one_chip_or_of_all(order: int) -> None:
    """What a process has opened decides what its devices are; the other way round would end in a segmentation fault."""
    simulated = {**os.environ, "PJRT_DEVICE": "CPU", "TPU_SKIP_MDS_QUERY": "1", "CPU_NUM_DEVICES": "4"}
    command = [sys.executable, "-c", ONE_THEN_ALL.replace("ORDER", str(order))]
    done = subprocess.run(command, capture_output=True, text=True, env=simulated, check=True)
    assert done.stdout.strip().endswith("take a process of its own") and done.stdout.count("\n") == 1, done.stdout
