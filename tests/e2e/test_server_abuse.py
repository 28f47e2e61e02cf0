"""Short runs of the scripts in benchmarks that treat whole servers badly: nothing may be found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "words",
    [
        "fuzz_server.py --inputs 800 --seed 7",
        "schemathesis_server.py --max-examples 3",
        # what times are good is for an idle machine to say
        "soak_server.py --minutes 0.3 --clients 24 --growth 1 --tiny --first-token-seconds 5 --ttft-ratio 1000000",
    ],
)
def test_nothing_is_found(words: str) -> None:
    name, *options = words.split()
    done = subprocess.run([sys.executable, str(BENCHMARKS / name), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
