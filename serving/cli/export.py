"""`pagoda export`: writes a model's step as an ONNX graph for other runtimes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from pagoda.hal.discovery import find
from pagoda.models.load import open_checkpoint
from pagoda.models.loading.reference import resolve
from pagoda.serving.cli.onnx_export import export as write
from pagoda.serving.cli.onnx_export import open_for_export


def export(
    model: Annotated[str, typer.Argument(help="As for `pagoda serve`.", metavar="MODEL")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to; it is made.", metavar="DIR")] = Path("onnx"),
    format: Annotated[Literal["onnx"], typer.Option(help="Of the file.")] = "onnx",
    dtype: Annotated[Literal["float32", "float16", "bfloat16"], typer.Option(help="Of weights and activations.")] = "float32",
) -> None:
    """Write a model's step as an ONNX graph: K and V of every layer go in and come out as plain tensors.

    A decoder takes input_ids, attention_mask, position_ids and past_key_values.N.key and .value `[batch, kv heads, past, dim]`, and gives
    logits and present.N.key and .value. A prompt is a step whose past is empty, a decode step one of a single token. An encoder takes
    input_ids, attention_mask and, where it knows them, token_type_ids, and gives last_hidden_state and sentence_embedding or scores.
    Batch, tokens and past are free. Needs the packages of `pip install 'pagoda-llm[export]'`.
    """
    backend = find("reference")
    loaded, description = open_for_export(open_checkpoint(resolve(model)), backend.open(0), dtype)
    output.mkdir(parents=True, exist_ok=True)
    written = write(loaded, description, output / "model.onnx")
    sizes = ", ".join(f"{path} ({path.stat().st_size / 1e6:,.1f} MB)" for path in written.files)
    typer.echo(f"{description.facts.architecture} in {dtype}: {sizes}")
    for title, names in (("inputs", written.inputs), ("outputs", written.outputs)):
        shown = names if len(names) <= 6 else (*names[:5], "…", names[-1])
        typer.echo(f"  {title:8} {', '.join(shown)}")
