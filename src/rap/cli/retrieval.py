"""`rap evaluate retrieval`: facts and tasks of long context, answered by reading."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ..checkpoint.files import whole_file
from ..checkpoint.provenance import provenance
from ..data.held_out import evaluation_tokens
from ..evaluation.quality.perplexity import check_sizes
from ..evaluation.retrieval.documents import WORDINGS, check_grid, check_wording
from ..evaluation.retrieval.needle import check_depths, heat_map, needle_grid, needle_table
from ..evaluation.retrieval.recall import copy_loss, recall_grid
from ..evaluation.retrieval.ruler import TASKS, check_tasks, ruler_grid, ruler_table
from ..model.errors import RapError
from . import options
from .checkpoints import (
    Haystack,
    Opened,
    Opening,
    ResultFile,
    deliver,
    label,
    open_checkpoint,
)
from .groups import grouped
from .options import console, print_table

FIGURES = (".png", ".svg")
NEEDLE, RECALL, RULER = "needle", "recall", "ruler"
# What each grid is asked with: its settings, and their values where none are given.
SETTINGS: dict[str, dict[str, Any]] = {
    RULER: {"length": (1024, 2048, 4096, 8192), "documents": 32, "batch_size": 1},
    NEEDLE: {
        "length": (256, 512, 1024, 2048),
        "depth": (0.0, 0.25, 0.5, 0.75, 1.0),
        "facts": (4,),
        "documents": 16,
        "batch_size": 4,
        "wording": "plain",
        "figure": None,
    },
    RECALL: {
        "distance": (64, 256, 1000),
        "facts": (1, 4, 16),
        "documents": 32,
        "batch_size": 8,
        "wording": "plain",
    },
}
SAID = {RULER: "the default tasks", NEEDLE: "--task needle", RECALL: "--task recall"}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What documents are made and asked; each task has its own defaults."""

    length: Annotated[
        list[int] | None,
        typer.Option(
            "--length",
            help="Tokens per document; repeatable [1024 to 8192, needle 256 to 2048].",
        ),
    ] = None
    depth: Annotated[
        list[float] | None,
        typer.Option("--depth", help="For needle: position of the fact, 0 to 1; repeatable."),
    ] = None
    distance: Annotated[
        list[int] | None,
        typer.Option(
            "--distance",
            help="For recall: tokens between fact and question; repeatable [64, 256, 1000].",
        ),
    ] = None
    facts: Annotated[
        list[int] | None,
        typer.Option(
            "--facts",
            help="Facts per document. For recall repeatable [1, 4, 16]; for needle [4].",
        ),
    ] = None
    documents: Annotated[
        int | None, typer.Option(help="Documents per setting [32, needle 16].")
    ] = None
    batch_size: Annotated[int | None, typer.Option(help="Documents per forward pass.")] = None
    wording: Annotated[
        str | None,
        typer.Option(
            "--wording",
            callback=lambda given: None if given is None else check_wording(given),
            help=f"For needle and recall: wording of facts and questions, {' or '.join(WORDINGS)} "
            "[plain]. Pretrained models need the natural one.",
        ),
    ] = None
    figure: Annotated[
        Path | None,
        typer.Option(
            help="For needle: heat map to write, .png or .svg. `rap report` shows it if it has the "
            "name of the result."
        ),
    ] = None

    def settings(self, kind: str) -> dict[str, Any]:
        """Every setting of a grid; RapError for one that it has not, or that cannot be."""
        given = {name: x for name, x in vars(self).items() if x is not None and x != []}
        for name in given.keys() - SETTINGS[kind].keys():
            flag = f"--{name.replace('_', '-')}"
            its = " or ".join(SAID[task] for task in SETTINGS if name in SETTINGS[task])
            raise RapError(f"{flag} is of {its} alone: remove it, or use that")
        asked = SETTINGS[kind] | given
        figure = asked.get("figure")
        if figure is not None and figure.suffix not in FIGURES:
            raise RapError(f"cannot draw {figure}: a heat map ends in {' or '.join(FIGURES)}")
        if kind == NEEDLE and len(asked["facts"]) > 1:
            raise RapError("--task needle asks with one number of --facts: give one")
        check_depths(asked.get("depth", ()))
        lengths = asked["distance" if kind == RECALL else "length"]
        check_grid(asked["documents"], lengths, asked.get("facts", ()))
        check_sizes(batch_size=asked["batch_size"])
        return asked


@grouped
def retrieval_command(
    model: options.Model,
    *,
    tasks: Annotated[
        list[str],
        typer.Option(
            "--task",
            help=f"Task, repeatable: {', '.join(TASKS)} [all of these]. Or needle: one fact at "
            "every depth and length. Or recall: fact recall by distance, and loss on repeated "
            "passages.",
        ),
    ] = list(TASKS),  # noqa: B006 - typer copies it
    text: Haystack = "bundled",
    asked: Asked,
    how: Opening,
    output: ResultFile = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Retrieval from a long context: RULER-like tasks, needle and recall; nothing is generated.

    An answer is right if every token of it is the greedy choice after the question and the answers
    before it (teacher-forced). Intervals are bootstrap intervals over documents.
    """
    kind = _kind(tasks)
    settings = asked.settings(kind)
    outputs = [output, settings.get("figure")]
    opened = open_checkpoint(model, how.device, how.device_map, outputs, how.quantize, bos=how.bos)
    ids = np.asarray(evaluation_tokens(text, opened.tokenizer))
    alike = {"num_documents": settings["documents"], "batch_size": settings["batch_size"]}
    alike |= {"seed": how.seed, "bos": opened.bos, "progress": not as_json}
    figures, table = GRIDS[kind](opened, ids, tasks, settings, alike)
    made = provenance(seed=how.seed, documents=settings["documents"], quantize=how.quantize)
    deliver(opened, {"text": text, "bos": opened.bos, **figures}, table, made, output, as_json)
    if kind == RECALL and not as_json:
        copied = figures["copy"]
        losses = f"{copied['first']:.2f}", f"{copied['second']:.2f}"
        print_table(
            "Loss on a passage, nats per token",
            ["passage", "read again after", "first time", "second time"],
            [[copied["passage"], copied["distance"], *losses]],
        )


def _kind(tasks: list[str]) -> str:
    """Which grid the tasks are of; RapError for an unknown one, or several grids at once."""
    own = [task for task in tasks if task in (NEEDLE, RECALL)]
    check_tasks([task for task in tasks if task not in own], beside=(NEEDLE, RECALL))
    if own and len({*tasks}) > 1:
        raise RapError(f"--task {own[0]} has a separate grid; run it without other tasks")
    return own[0] if own else RULER


Settings = dict[str, Any]
Measured = tuple[dict[str, Any], dict[str, Any]]  # figures of a result, and its table


def _ruler(
    opened: Opened, ids: np.ndarray, tasks: list[str], asked: Settings, how: Settings
) -> Measured:
    cells = ruler_grid(
        opened.model,
        opened.tokenizer,
        ids,
        tasks=tasks,
        lengths=asked["length"],
        **how,
    )
    title = f"RULER-like tasks, {label(opened)}: accuracy (95% interval)"
    return {"ruler": [asdict(cell) for cell in cells]}, ruler_table(title, cells)


def _needle(
    opened: Opened, ids: np.ndarray, tasks: list[str], asked: Settings, how: Settings
) -> Measured:
    (facts,) = asked["facts"]
    cells = needle_grid(
        opened.model,
        opened.tokenizer,
        ids,
        lengths=asked["length"],
        depths=asked["depth"],
        num_facts=facts,
        wording=asked["wording"],
        **how,
    )
    title = f"Needles found by {label(opened)}, one of {facts} facts"
    figure = asked["figure"]
    if figure is not None:
        with whole_file(figure) as partial:
            heat_map(cells, title).savefig(partial, format=figure.suffix[1:], dpi=160)
        console.print(f"wrote {figure}")
    found = {"facts": facts, "wording": asked["wording"]}
    return found | {"needle": [asdict(cell) for cell in cells]}, needle_table(title, cells)


def _recall(
    opened: Opened, ids: np.ndarray, tasks: list[str], asked: Settings, how: Settings
) -> Measured:
    facts, distances = asked["facts"], asked["distance"]
    grid: dict[str, Any] = {"distances": distances, "facts": facts, "wording": asked["wording"]}
    cells = recall_grid(opened.model, opened.tokenizer, ids, **grid, **how)
    copying = {name: x for name, x in how.items() if name != "progress"}
    copied = copy_loss(opened.model, ids, **copying)
    by_place = {(cell.distance, cell.num_facts): f"{cell.accuracy:.0%}" for cell in cells}
    table = {
        "title": f"Recall of {label(opened)}: share of numbers given back",
        "header": ["distance", *(f"{n} facts" if n > 1 else "1 fact" for n in facts)],
        "rows": [[f"{far:,}", *(by_place[far, n] for n in facts)] for far in distances],
    }
    found = {"wording": asked["wording"], "recall": [asdict(cell) for cell in cells]}
    return found | {"copy": {**asdict(copied), "gain": copied.gain}}, table


GRIDS: dict[str, Callable[..., Measured]] = {RULER: _ruler, NEEDLE: _needle, RECALL: _recall}
