"""Options that several commands share, the YAML configuration file, and printing."""

import json
from collections.abc import Sequence
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
from ..planning.shared import TARGETS
from .console import console
from .sections import own_entries

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
    defaults = {names[key]: value for key, value in given.items()}
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
    typer.Option("--dry-run", help="Say what would be done, the memory and the time it takes."),
]
Output = Annotated[Path, typer.Option("--output", "-o", help="Directory to write.")]
Model = Annotated[str, typer.Argument(help="Checkpoint directory or hub name; 'bundled' works.")]
MethodName = Annotated[
    str,
    typer.Option("--method", help=f"{GRAMMAR}; names: {', '.join(METHODS)}."),
]
Retain = Annotated[float, typer.Option("--retain", help="Fraction of the KV cache to keep.")]
Score = Annotated[str | None, typer.Option("--score", help="How pairs are scored.")]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        help="How layers share the budget: uniform, adaptive, error, or search, which tries cuts.",
    ),
]
Metric = Annotated[
    str | None,
    typer.Option("--metric", help="What cuts keep small: the loss, or the output's error."),
]
Keys = Annotated[str | None, typer.Option("--keys", help="How keys are cut.")]
Values = Annotated[str | None, typer.Option("--values", help="How values are cut.")]
KeyShare = Annotated[
    str | None, typer.Option("--key-share", help="K's share of the budget, or 'pooled'.")
]
Align = Annotated[int | None, typer.Option("--align", help="Width multiple, in channels.")]
Context = Annotated[
    int | None, typer.Option("--context", help="Tokens over which folded keys may drift.")
]
Profile = Annotated[
    str | None, typer.Option("--profile", help="per-head, or stock for `rap export stock`.")
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target",
        help=f"Choose widths that an engine serves without padding: {', '.join(TARGETS)}.",
    ),
]
Calibration = Annotated[
    str,
    typer.Option(
        "--calibration",
        help="'bundled' novels, 'wikitext2' (validation split), 'paper' (WikiText-2, 32 x 1024), "
        "a .txt or .jsonl file, a dataset name, or 'own' (text that the model writes once); a "
        "comma list mixes them in equal shares. 'repeated:mine.txt' is all of it twice, passage by "
        "passage; 'general:mine.txt' is mine.txt, repeated:mine.txt and own.",
    ),
]
NumWindows = Annotated[int, typer.Option("--windows", help="Calibration windows.")]
Window = Annotated[int, typer.Option("--window", help="Tokens per window.")]
Evaluate = Annotated[
    str,
    typer.Option(
        "--evaluate",
        help="Evaluation dataset: 'held-out', a split of the data that is kept out of calibration "
        "and recovery; 'bundled', 'wikitext2', 'c4', a file or a dataset; or 'none'.",
    ),
]
Bos = Annotated[
    str,
    typer.Option(
        "--bos",
        callback=check_bos,
        help="Begin windows of text with BOS: always, never, or auto, as the tokenizer does and "
        "the family needs.",
    ),
]
# As large as every generator takes, some of which add to it.
Seed = Annotated[
    int, typer.Option("--seed", min=0, max=2**31 - 1, help="Seed of every random choice.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Device = Annotated[
    str,
    typer.Option(
        "--device",
        help="Device to run on: auto (the GPU if there is one, else the CPU), cpu, cuda.",
    ),
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map", help="For a model larger than one device: its placement, such as auto."
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
    """Write a result file and say where it is."""
    write_json(path, data)
    console.print(f"wrote {path}")
