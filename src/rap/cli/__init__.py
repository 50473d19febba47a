"""The command line: one module per group of commands, all reading the library's own dataclasses.

A module is imported when one of its commands is asked for.
"""

import sys
from typing import Any

import typer
from typer.exceptions import TyperException

from ..checkpoint.version import __version__
from ..model.errors import RapError, out_of_memory
from .topics import STOPPED, Topics, stopped

NO_MEMORY = (
    "out of memory: give fewer or shorter windows (--windows, --window, --set fit.num_windows=24), "
    "a smaller --batch-size or --set micro_batch=1, or compress with --stream; "
    "`--dry-run` says what compress and recover hold"
)

app = typer.Typer(
    name="rap",
    cls=Topics,
    help="Make the KV cache of a RoPE language model permanently smaller.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rap {__version__}")
        raise typer.Exit


@app.callback()
def settings(
    debug: bool = typer.Option(False, "--debug", help="Show the traceback of an error."),
    version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """Options of every command; `--debug` is read by `main`."""


def _explained(error: Exception) -> str | None:
    """What to say of an error that the input or the machine is the cause of; None of any other."""
    if isinstance(error, TyperException):
        return error.format_message()
    if out_of_memory(error):
        return NO_MEMORY
    return str(error) if isinstance(error, (RapError, OSError)) else None


def _console() -> Any:
    # Imported here: help and version need neither rich nor what options bring along.
    from .console import console

    return console


def main() -> None:
    """Entry point: bad input ends in one line and exit code 2, never in a traceback.

    Exit codes are those of `topics.EXIT_CODES`; Ctrl-C says how to go on, and is 130.
    """
    debug = "--debug" in sys.argv[1:]
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    try:
        code = app(arguments, prog_name="rap", standalone_mode=False)
    except typer.Abort:
        code = STOPPED
    except (TyperException, RapError, OSError, RuntimeError, MemoryError) as error:
        text = _explained(error)
        if debug or text is None:
            raise
        if text.startswith("Usage:"):
            # A command group without a command: its help, whole.
            typer.echo(text, err=True)
            sys.exit(2)
        _console().print(f"error: {' '.join(text.split())}", style="red", soft_wrap=True)
        code = 2
    if code == STOPPED:
        # typer makes this code of Ctrl-C.
        _console().print(stopped(arguments), soft_wrap=True)
    sys.exit(code or 0)
