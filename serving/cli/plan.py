"""`pagoda plan`: where memory will go, what fits, and which kernel each primitive gets and why, before anything loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pagoda.serving.cli.flags import Parser, build
from pagoda.serving.cli.plan_view import record, show
from pagoda.serving.cli.words import with_model
from pagoda.serving.engine.config import EngineConfig, Flag
from pagoda.serving.engine.engine_plan import plan_engine
from rich.console import Console


@dataclass(frozen=True)
class PlanOptions:
    """Of `pagoda plan`."""

    json: Annotated[bool, Flag("Print JSON instead of the tables.", section="Output")] = False


def run(argv: Sequence[str]) -> int:
    parser = Parser("plan", "Where memory would go and which kernels would run; loads nothing.", "[MODEL] [options]", words=1)
    parser.add_config(PlanOptions)
    parser.add_config(EngineConfig)
    parser.add_config_file()
    values = with_model(parser.values(argv))
    plan = plan_engine(build(EngineConfig, values))
    if build(PlanOptions, values).json:
        print(json.dumps(record(plan), indent=2))
    else:
        show(plan, Console(highlight=False))
    return 0
