"""`rap export`: a checkpoint in a form that other programs read."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.provenance import provenance
from ..checkpoint.source import resolve_source
from ..serving.gguf.export import TYPE_NAMES, export_gguf
from ..serving.stock import export_stock
from . import options
from .options import console, print_json

export_app = typer.Typer(no_args_is_help=True, help="Write a checkpoint in another form.")


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.add_typer(export_app, name="export")


@export_app.command("stock")
def export_stock_command(
    model: options.Model,
    output: options.Output,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Write MODEL, of uniform layout, as a plain checkpoint."""
    stock = export_stock(resolve_source(model), output, force=force)
    report = {
        "output": str(Path(output)),
        "model_type": stock.config.model_type,
        "head_dim": stock.config.head_dim,
    }
    if as_json:
        print_json({**report, "provenance": provenance(model=model)})
    else:
        console.print(
            f"wrote {output}: a plain {report['model_type']} with heads of {report['head_dim']} "
            "channels"
        )


@export_app.command("gguf")
def export_gguf_command(
    model: options.Model,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write, FILE.gguf.")],
    kind: Annotated[
        str, typer.Option("--type", help=f"Data type of matrices: {', '.join(TYPE_NAMES)}.")
    ] = "f16",
    tokenizer_from: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer-from", help="GGUF file of the dense model whose tokenizer to copy."
        ),
    ] = None,
    pre: Annotated[
        str | None,
        typer.Option("--pre", help="llama.cpp's name of the pre-tokenizer."),
    ] = None,
    rotate: Annotated[
        bool,
        typer.Option(
            "--rotate", help="Apply a Hadamard rotation to values, for an 8-bit or 4-bit cache."
        ),
    ] = False,
    force: options.Force = False,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Write MODEL, dense or of uniform layout, as a GGUF file for llama.cpp."""
    written = export_gguf(
        resolve_source(model),
        output,
        kind=kind,
        tokenizer_from=tokenizer_from,
        pre=pre,
        rotate=rotate,
        force=force,
        progress=not as_json,
    )
    if as_json:
        settings = {"model": model, "type": kind, "pre": pre, "rotate": rotate}
        print_json({**asdict(written), "provenance": provenance(**settings)})
        return
    for warning in written.warnings:
        console.print(f"warning: {warning}", style="yellow")
    checked = ["rap", "verify", str(output), "--engine", "llamacpp", "--reference", model]
    console.print(
        f"wrote {output}: {written.num_bytes / 2**20:,.0f} MiB as {kind}, heads of "
        f"{written.head_dim} channels; `{shlex.join(checked)}`"
    )
