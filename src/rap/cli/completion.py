"""`rap completion`: a script of the shell's own, so that the TAB key does not wait for torch."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ..model.errors import RapError

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
