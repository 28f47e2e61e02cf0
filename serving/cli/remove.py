"""`pagoda rm`: removes a model from the hub's cache."""

from __future__ import annotations

from typing import Annotated

import typer
from pagoda.hal.errors import ConfigError
from pagoda.models.loading.hub import Hub
from pagoda.models.loading.hub import remove as remove_cached
from pagoda.models.loading.reference import PACKAGED


def remove(model: Annotated[str, typer.Argument(help="Hub id, as `pagoda list` shows it.", metavar="MODEL")]) -> None:
    """Delete a model from the cache."""
    packaged = PACKAGED.get(model.lower())
    if packaged is not None:
        raise ConfigError(
            f"model {model} belongs to the installed package {packaged.distribution}; run: pip uninstall {packaged.distribution}"
        )
    gone = remove_cached(Hub(), model)
    typer.echo(f"removed {gone.name}: {gone.nbytes:,} bytes in {len(gone.revisions)} revision(s)")
