"""Options that several commands share, the YAML configuration file, and printing.

One YAML file serves several commands: sections are named after them, beside data that is no option.

    compress: {recover: paper}     options of `rap compress` alone
    evaluate: {bos: never, retrieval: {length: 4096}}
                                   of all `rap evaluate` commands, and of `rap evaluate retrieval`
    shared: &shared {model: m}     for sections to include, as `<<: *shared`
    paper: [{method: rap, ...}]    published figures, which `rap compare` shows beside its own

Without sections all entries are options of the command that reads the file.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..checkpoint.files import write_json
from ..data.bos import check_bos
from ..methods import METHODS
from ..methods.naming import GRAMMAR
from ..model.errors import RapError
from ..serving.targets import TARGETS

# Plain text in, plain text out: messages name extras with brackets, and paths stay in one piece.
console = Console(stderr=True, markup=False, soft_wrap=True)


# A pipe has no width; tables there should neither wrap nor lose columns.
PIPE_WIDTH = 160


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make a YAML file's entries the defaults of this command; flags still win."""
    if path is None:
        return None
    if not path.is_file():
        raise RapError(f"--config {path}: no such file")
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RapError(f"--config {path} is not YAML: {error}") from error
    if not isinstance(entries, dict):
        raise RapError(f"--config {path} must hold `option: value` lines, not a {_kind(entries)}")
    entries = own_entries(context, entries)
    names = _option_names(context)
    given = {str(key).replace("_", "-"): value for key, value in entries.items()}
    unknown = sorted(given.keys() - names.keys())
    if unknown:
        raise RapError(
            f"--config {path} sets unknown options: {', '.join(unknown)}; this command has: "
            f"{', '.join(sorted(names))}"
        )
    several = {one.name for one in context.command.params if getattr(one, "multiple", False)}
    defaults = {names[key]: value for key, value in given.items()}
    for name in several & defaults.keys():
        value = defaults[name]
        defaults[name] = value if isinstance(value, list) else [value]
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def was_given(context: typer.Context, name: str) -> bool:
    """Whether a parameter was set on the command line or in the file of `--config`."""
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def _option_names(context: typer.Context) -> dict[str, str]:
    """What a person may write in the file (flags without dashes, arguments) to parameter names."""
    names = {}
    for parameter in context.command.params:
        flags = [flag[2:] for flag in parameter.opts if flag.startswith("--")]
        for name in flags or [parameter.name or ""]:
            names[name] = parameter.name or ""
    return {name: parameter for name, parameter in names.items() if name not in ("config", "help")}


def _kind(value: object) -> str:
    return {"list": "list", "str": "text"}.get(type(value).__name__, "single value")


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_read_config,
        is_eager=True,
        help="YAML file with options of this command; flags win over it.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the output if it exists.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Print steps with token counts and memory, then exit."),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Directory to write.")]
Model = Annotated[
    str, typer.Argument(help="Local directory, Hub ID, GGUF file, or 'bundled' (4.6M test model).")
]
MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        help=f"{GRAMMAR}; names: {', '.join(METHODS)}. `rap` merges KV heads; with `rap:merge=1` "
        "attention parameters and FLOPs shrink too.",
    ),
]
Retain = Annotated[float, typer.Option("--retain", help="Fraction of the KV cache to keep.")]
Score = Annotated[
    str | None,
    typer.Option("--score", help="Pair importance, with --keys pairs or --values channels."),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="Budget: error (estimated loss), uniform, tempered (between both), search (measured "
        "loss), retrieval (wider layers that copy) or adaptive.",
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        "--metric",
        help="Pruning objective: loss (needs gradients) or output (forward passes only) [loss].",
    ),
]
Keys = Annotated[
    str | None,
    typer.Option("--keys", help="fold (merge similar-frequency RoPE pairs) or pairs [fold]."),
]
Values = Annotated[
    str | None, typer.Option("--values", help="subspace (low-rank latent) or channels [subspace].")
]
KeyShare = Annotated[
    str | None, typer.Option("--key-share", help="Share of keys in the budget, or 'pooled' [0.5].")
]
Align = Annotated[
    int | None, typer.Option("--align", help="Head dimensions are multiples of this many channels.")
]
Layers = Annotated[
    str | None,
    typer.Option(
        "--layers",
        help="Layers: full leaves those with a sliding window dense where others have full "
        "attention; all prunes every layer. [default: full]",
    ),
]
Context = Annotated[
    int | None,
    typer.Option("--context", help="Context length that decides which RoPE pairs may be merged."),
]
Profile = Annotated[
    str | None,
    typer.Option("--profile", help="Layout: per-head, or stock (uniform, for plain checkpoints)."),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        help=f"Engine whose head dimensions to use, without padding: {', '.join(TARGETS)}. "
        "`plain` merges KV heads; `llamacpp`, `mlx` and `stock` do not.",
    ),
]
Calibration = Annotated[
    str,
    typer.Option(
        "--calibration",
        help="Calibration data: 'bundled', 'wikitext2', 'paper' (WikiText-2), a .txt or .jsonl "
        "file, or a dataset ID. Also 'encyclopedia', 'own' (generated by the model), 'python' "
        "(standard library). "
        "Comma-separated sources get equal shares. 'repeated:SRC' repeats each passage; "
        "'general:SRC' is SRC,repeated:SRC,own,python.",
    ),
]
Completed = Annotated[
    str,
    typer.Option(
        "--calibration",
        help="Calibration data, which recovery reads too: 'bundled', 'wikitext2', 'paper' "
        "(WikiText-2), 'c4', a .txt or .jsonl file, or a dataset ID. Also 'encyclopedia', 'own' "
        "(generated by the model) and 'python' (standard library). 'repeated:SRC' has each passage "
        "twice. A single source SRC is completed to SRC,repeated:SRC,own,python; 'only:SRC' reads "
        "it alone. Comma-separated sources get equal shares. "
        "auto: bundled,own,repeated:encyclopedia,python.",
    ),
]
NumWindows = Annotated[int, typer.Option("--windows", help="Number of calibration samples.")]
Window = Annotated[int, typer.Option("--window", help="Tokens per calibration sample.")]
Evaluate = Annotated[
    str,
    typer.Option(
        "--evaluate",
        help="Evaluation dataset: 'held-out' (a split of the calibration data), 'bundled', "
        "'wikitext2', 'c4', a file, a dataset ID, or 'none'.",
    ),
]
Bos = Annotated[
    str,
    typer.Option(
        "--bos",
        callback=check_bos,
        help="Begin samples with BOS: always, never, or auto (as the tokenizer and the family "
        "require).",
    ),
]
# As large as every generator takes, some of which add to it.
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**31 - 1, help="Random seed.")]
Dtype = Annotated[
    str, typer.Option("--dtype", help="Data type: auto, float32, bfloat16 or float16.")
]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="Device: auto (a GPU if one exists), cpu or cuda.",
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map", help="Placement of a model that exceeds one device, such as auto."
    ),
]


def print_json(data: object) -> None:
    """One JSON object on standard output."""
    typer.echo(json.dumps(data, indent=2, sort_keys=True))


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table on standard output: first column to the left, figures to the right."""
    table = Table(header_style="bold")
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    out = Console(markup=False)
    if not out.is_terminal:
        out.width = max(out.width, PIPE_WIDTH)
    out.print(title, soft_wrap=True, highlight=False)
    out.print(table)


def write_result(path: Path, data: object) -> None:
    """Write a result file and print its path."""
    write_json(path, data)
    console.print(f"wrote {path}")


DATA = ("paper", "shared")


def own_entries(context: typer.Context, entries: dict[str, Any]) -> dict[str, Any]:
    """The entries that concern this command: those outside sections, then its section.

    A section is a mapping under the name of a command or a group of commands, whose section may
    have sections of its commands; `recover: fast` is an option all the same.
    """
    path: list[Any] = [context]
    while path[0].parent is not None:
        path.insert(0, path[0].parent)
    chosen: dict[str, Any] = {}
    for group, step in pairwise(path):
        commands = getattr(group.command, "commands", {})
        sections = {key for key in commands if isinstance(entries.get(key), dict)}
        chosen |= {key: value for key, value in entries.items() if key not in {*sections, *DATA}}
        name = str(step.command.name)
        entries = entries[name] if name in sections else {}
    return chosen | entries


def read_figures(path: Path | None) -> list[dict[str, Any]]:
    """The published figures of a file, none without one.

    Each names the `method`, `retain` and `recover` of a cell, and the `source` of its figures.
    Raises RapError for anything but a list of such entries.
    """
    if path is None:
        return []
    figures = (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("paper") or []
    if not isinstance(figures, list) or not all(isinstance(entry, dict) for entry in figures):
        raise RapError(f"--config {path}: paper must be a list of figures, each with a method")
    return figures
