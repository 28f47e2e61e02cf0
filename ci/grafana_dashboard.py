"""Writes docs/grafana/pagoda.json, a panel for each metric that the server's registry holds; `--check`: is the one in the tree current?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pagoda.serving.api.engine_metrics import LABELS
from pagoda.serving.api.metrics import Metrics
from pagoda.serving.engine.messages import EngineFacts
from prometheus_client.core import Metric

PAGE = Path(__file__).resolve().parent.parent / "docs" / "grafana" / "pagoda.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
CHOSEN = 'model_name=~"$model"'
WIDTH, HEIGHT, COLUMNS = 8, 7, 3
QUANTILES = (0.5, 0.9, 0.99)
KINDS = (("gauge", "Now"), ("histogram", "Latencies and lengths"), ("counter", "Rates"))
UNITS = {"seconds": "s", "tokens": "short", "perc": "percentunit"}


def dashboard() -> dict[str, Any]:
    """As Grafana imports it; it asks for the Prometheus source, and chooses among models."""
    metrics = Metrics("any")
    metrics.describe_cache(EngineFacts(1, 1, 1, 1, "any"))
    families = [one for one in metrics.families() if not one.name.endswith("_info")]
    panels: list[dict[str, Any]] = []
    top = 0
    for kind, title in KINDS:
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], "gridPos": _place(top, 0, 24, 1)})
        of_kind = [one for one in families if one.type == kind]
        panels += [_panel(one, top + 1, index) for index, one in enumerate(of_kind)]
        top += 1 + HEIGHT * -(-len(of_kind) // COLUMNS)
    return {
        "title": "Pagoda",
        "uid": "pagoda",
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source(), _model()]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }


def _labels(family: Metric) -> set[str]:
    return {name for sample in family.samples for name in sample.labels}


def _panel(family: Metric, top: int, index: int) -> dict[str, Any]:
    row, column = divmod(index, COLUMNS)
    return {
        "type": "timeseries",
        "title": family.name.removeprefix("vllm:").replace("_", " "),
        "description": family.documentation,
        "datasource": SOURCE,
        "gridPos": _place(top + row * HEIGHT, column * WIDTH, WIDTH, HEIGHT),
        "fieldConfig": {"defaults": {"unit": _unit(family), "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(_queries(family))
        ],
    }


def _queries(family: Metric) -> list[tuple[str, str]]:
    name = f"{family.name}{{{CHOSEN}}}"
    if family.type == "gauge":
        return [(f"sum by (model_name) ({name})" if _unit(family) != "percentunit" else f"max by (model_name) ({name})", "{{model_name}}")]
    more = sorted({label for sample in family.samples for label in sample.labels} - {*LABELS, "le"})
    by = ", ".join(("model_name", *more))
    legend = " ".join(f"{{{{{label}}}}}" for label in ("model_name", *more))
    if family.type == "counter":
        return [(f"sum by ({by}) (rate({family.name}_total{{{CHOSEN}}}[$__rate_interval]))", legend)]
    buckets = f"sum by (le, model_name) (rate({family.name}_bucket{{{CHOSEN}}}[$__rate_interval]))"
    return [(f"histogram_quantile({share}, {buckets})", f"p{share * 100:g} {{{{model_name}}}}") for share in QUANTILES]


def _unit(family: Metric) -> str:
    if family.type == "counter":
        return "cps"
    return UNITS.get(family.name.rsplit("_", 1)[-1], "short")


def _place(top: int, left: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def _source() -> dict[str, Any]:
    return {"name": "source", "type": "datasource", "query": "prometheus", "label": "Source"}


def _model() -> dict[str, Any]:
    query = "label_values(vllm:num_requests_running, model_name)"
    return {
        "name": "model",
        "type": "query",
        "label": "Model",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "models"},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def main() -> int:
    text = json.dumps(dashboard(), indent=1) + "\n"
    if "--check" not in sys.argv[1:]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(text, encoding="utf-8")
        return 0
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
    if stale:
        print("docs/grafana/pagoda.json is stale; run python ci/grafana_dashboard.py")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
