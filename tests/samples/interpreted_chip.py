"""The Triton kernels in Triton's interpreter as a device, beside the references; its answers, in a process of its own.

`python interpreted_chip.py FOLDER DEVICE` prints greedy answers and the kernels that gave them as JSON. Triton decides when a kernel is
declared whether it is interpreted, so the process is to have TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pagoda.backends.reference.backend import ReferenceBackend
from pagoda.hal.device import Device
from pagoda.hal.info import DeviceInfo, Feature
from pagoda.hal.kernel import Kernel
from pagoda.ops.triton.kernels import triton_kernels

NAME = "interpreted"
BESIDE = Path(sys.prefix) / "triton"
"""Where `python ci/install.py --triton` puts it: other tests run without."""
PROMPTS = [[70 + n % 40 for n in range(41)], [9, 40, 17, 88, 23], [60], list(range(30, 51))]
COUNT = 6


class Interpreted(ReferenceBackend):
    name = NAME

    def describe(self, model: str | None = None) -> DeviceInfo:
        info = super().describe()
        return replace(info, features=info.features | {Feature.TRITON})

    def open(self, index: int = 0) -> Device:
        device = super().open(index)
        device.info = self.describe()
        return device

    def kernels(self) -> Iterable[Kernel]:
        return triton_kernels()


def has_triton() -> bool:
    return find_spec("triton") is not None or (BESIDE / "triton").is_dir()


def answers(folder: Path, plugin: Path, device: str) -> dict[str, Any]:
    """Of the checkpoint in `folder`; `plugin`: an empty folder, where the device is made known."""
    info = plugin / f"{NAME}-1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[pagoda.backends]\n{NAME} = {Path(__file__).stem}:Interpreted\n")
    beside = [] if find_spec("triton") else [str(BESIDE)]  # first: its numpy is older, as the interpreter needs
    paths = [*beside, str(plugin), os.path.dirname(__file__), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "1"}
    command = [sys.executable, __file__, str(folder), device]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(folder: str, device: str) -> None:
    from pagoda.serving.engine.params import SamplingParams
    from pagoda.serving.sdk import LLM

    asked = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True, logprobs=5)
    with LLM(
        folder, device=device, dtype="float32", max_model_len=64, max_num_seqs=3, max_num_batched_tokens=24, kv_cache_memory_bytes=8 << 20,
        skip_tokenizer_init=True,
    ) as llm:  # fmt: skip
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)
        first = [output.outputs[0] for output in outputs]
        best = [[max(row.values(), key=lambda one: one.logprob).logprob for row in answer.logprobs or ()] for answer in first]
        kernels = llm._session.client.facts.kernels
    print(json.dumps({"tokens": [list(answer.token_ids) for answer in first], "best": best, "kernels": dict(kernels)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
