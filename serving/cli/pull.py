"""`pagoda pull`: brings a model of the hub into the cache."""

from __future__ import annotations

from typing import Annotated

import typer
from pagoda.models.loading.hub import Hub
from pagoda.models.loading.reference import resolve


def pull(
    model: Annotated[str, typer.Argument(help="Hub id; owner/name:Q4_K_M takes one of a repository's GGUF files.", metavar="MODEL")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    hf_token: Annotated[str | None, typer.Option(help="Token for private or gated models; `hf auth login` keeps one.")] = None,
) -> None:
    """Fetch a model, so that serving it needs no network."""
    typer.echo(str(resolve(model, revision, Hub(token=hf_token))))
