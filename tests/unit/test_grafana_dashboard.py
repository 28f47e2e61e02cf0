"""The dashboard asks for what the server tells, all of it, and for nothing else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from toy_server import toy_server

ROOT = Path(__file__).resolve().parents[2]
BOARD = json.loads((ROOT / "docs/grafana/pagoda.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] == "timeseries"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_the_dashboard_in_the_tree_is_current() -> None:
    done = subprocess.run([sys.executable, "ci/grafana_dashboard.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_its_queries_are_the_servers_metrics() -> None:
    async with toy_server() as toy:
        await toy.complete("abc")
        text = (await toy.http.get("/metrics")).text
    told = {name for name in re.findall(r"^# TYPE (vllm:\w+) ", text, re.MULTILINE) if not name.endswith("_created")}
    asked = {re.sub("_bucket$", "", name) for query in QUERIES for name in re.findall(r"vllm:\w+", query)}
    assert asked == told - {"vllm:cache_config_info", "vllm:lora_requests_info"} and len(asked) > 45
    for query in QUERIES:
        assert query.count("(") == query.count(")") and 'model_name=~"$model"' in query


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
