"""schemathesis over `/openapi.json` of real servers of tiny models: what it finds, by operation.

    python benchmarks/schemathesis_server.py --max-examples 40 --output docs/perf/results/server-schemathesis.json

It makes requests that the document allows and others that it forbids, and compares answers with the document: status, content type,
record, methods. Exits non-zero when it found something. `positive_data_acceptance` is left out: a schema cannot say that a prompt must fit
into the context, or which two fields exclude each other.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "samples"))

from tiny_servers import tiny_server

LEFT_OUT = "positive_data_acceptance"


def check(where: str, examples: int, seed: int, folder: Path) -> tuple[dict[str, Any], str]:
    """One run against a running server: how many cases and what failed, and what it printed, with lines to repeat that."""
    report = folder / "report.json"
    words = [
        "run",
        f"{where}/openapi.json",
        "--checks",
        "all",
        "--exclude-checks",
        LEFT_OUT,
        "--continue-on-failure",
        "--max-examples",
        str(examples),
        "--seed",
        str(seed),
        "--phases",
        "examples,coverage,fuzzing",
        "--request-timeout",
        "60",
        "--suppress-health-check",
        "all",
        "--no-shrink",
        "--report",
        "json",
        "--report-json-path",
        str(report),
    ]
    done = subprocess.run(
        [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,  # where it keeps what it found
    )
    made = json.loads(report.read_text()) if report.exists() else {}
    kept = ("schemathesis_version", "seed", "complete", "operations", "phases", "test_cases", "failures", "errors")
    return {"exit_code": done.returncode, **{name: made.get(name) for name in kept}}, done.stdout[-6000:] + done.stderr[-2000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-examples", type=int, default=40, help="of each operation in the phase that fuzzes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=("generate", "embed", "score", "hear"), default="generate")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tiny_server(Path(folder), options.only) as server:
        found, printed = check(server.where, options.max_examples, options.seed, Path(folder))
        traces = [line for line in server.errors if "Traceback" in line]
    command = f"python benchmarks/schemathesis_server.py --max-examples {options.max_examples} --seed {options.seed} --only {options.only}"
    found = {"date": time.strftime("%Y-%m-%d"), "command": command, "tracebacks": len(traces), **found}
    if options.output is not None:
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    print(printed)
    return 1 if found["exit_code"] or traces else 0


if __name__ == "__main__":
    sys.exit(main())
