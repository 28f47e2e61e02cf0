"""Runs a command that is a typer function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import typer
from pagoda.hal.errors import ConfigError


def run(name: str, function: Callable[..., Any], argv: Sequence[str]) -> int:
    """The command's exit code; raises `ConfigError` for wrong usage."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name)(function)
    try:
        result = app(args=list(argv), prog_name=f"pagoda {name}", standalone_mode=False)
    except Exception as error:
        told = getattr(error, "format_message", None)  # usage errors; their class moved between versions of typer
        if told is None:
            raise
        raise ConfigError(f"{told().rstrip('.')}; see pagoda {name} --help") from error
    return result if isinstance(result, int) else 0
