"""A thousand damaged and hostile checkpoints: each must be refused with an error of our own, or give the right answer.

    python ci/mutated_checkpoints.py --count 1000 --output docs/perf/results/mutated-checkpoints.json

Each is loaded in a process of its own with limits of time and memory; safetensors folders with their config.json, and GGUF files. Exits
non-zero when one crashed, hung, ran away with memory, raised a foreign error, or answered wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "samples"))

from mutated import answer, cases, make_bases, run_case


def run(count: int, seed: int) -> dict[str, Any]:
    """The document."""
    kinds: dict[str, Counter[str]] = {}
    errors: Counter[str] = Counter()
    faults: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        bases = make_bases(Path(name) / "bases")
        sound = {base: answer(path) for base, path in bases.items()}
        for number, case in enumerate(cases(bases, Path(name), seed, count)):
            outcome = run_case(case, sound[case.base])
            kinds.setdefault(case.kind, Counter())[outcome.ended] += 1
            errors[outcome.error or outcome.ended] += 1
            if outcome.fault:
                faults.append(f"{number} {case.base}, {case.kind}: {outcome.ended} {outcome.error} {outcome.message}")
                print(faults[-1], flush=True)
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "command": f"python ci/mutated_checkpoints.py --count {count} --seed {seed}",
        "checkpoints": count,
        "faults": faults,
        "kinds": {kind: dict(sorted(ends.items())) for kind, ends in sorted(kinds.items())},
        "ends": dict(sorted(errors.items())),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(arguments)
    document = run(asked.count, asked.seed)
    if asked.output is not None:
        asked.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(f"{asked.count} checkpoints, {len(document['faults'])} faults: {document['ends']}")
    return 1 if document["faults"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
