"""Running a comparison: finished runs are kept, failures are recorded, the rest continues.

`cell_command` writes the command line that repeats a grid, or one cell of it: flags for all that is
no default. Models that are kept as checkpoints, for measures and recoveries to come, are in

    OUT/models/<name>/made.json     what the cell says of how the model was made
    OUT/models/<name>/...           the checkpoint, which any command takes
"""

import shlex
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...calibration.dense_context import CalibrationText, DenseContext
from ...calibration.statistics import Statistics
from ...checkpoint.device import AUTO, placement
from ...checkpoint.files import check_folder, read_json, whole_directory, write_json, write_model
from ...checkpoint.load import load
from ...checkpoint.provenance import provenance
from ...data.digests import check_digests, note_digests
from ...data.held_out import check_apart, split
from ...data.text import check_sources
from ...methods import Method
from ...model.errors import RapError
from ...recovery.runs import clear_work
from ...recovery.stages import recover_stage, work_folder
from .grid import Cell, Grid, finished, store
from .measurement import HeldOut, Measures, dense_states, measure
from .tables import summarize
from .variants import DENSE, all_variants, parse_names

RESULT_FILE = "compare.json"

Say = Callable[[str], None]


def compare(
    source: str | Path | PreTrainedModel = "bundled",
    *,
    output: str | Path,
    methods: Sequence[str] | None = None,
    retain: Sequence[float] = (0.7, 0.5),
    recover: Sequence[str] = ("none",),
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: Any = "float32",
    device: str = AUTO,
    device_map: str | None = None,
    measures: Measures | None = None,
    paper: Sequence[dict[str, Any]] = (),
    title: str = "",
    keep: bool = False,
    say: Say = lambda line: None,
    progress: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Measure `methods` (default: all there are) side by side, cell by cell, into `output`.

    A cell is a method at one ratio of `retain` after one of `recover`, measured as `measures` says,
    of a `source` loaded in `dtype` onto `device`, or a large one by `device_map`. A killed or
    repeated call continues where it stopped; a text file or a config that changed since is refused.
    `settings` are the other fields of `grid.Grid` (calibration, num_windows, window, align, seed,
    bos, recovery). `paper` are published figures to show beside the cells of the same method,
    retain and recovery. A live model as `source` needs its `tokenizer`. `title` tells this
    comparison from others in a report. `keep` saves every model that is made in `output`/models,
    where a later call that measures it otherwise, or distils a fitted one, finds it. `say` is given
    a line for every cell.

    Returns what it writes to `output`/compare.json: tables, one record a cell, and the failures.
    Raises a RapError for anything wrong with the request itself, before any work.
    """
    grid = Grid(
        methods=tuple(all_variants() if methods is None else parse_names(methods)),
        retains=tuple(dict.fromkeys(map(float, retain))),
        recoveries=tuple(dict.fromkeys(recover)),
        **_data(measures or Measures(), settings.pop("calibration", "bundled")),
        **settings,
    )
    # A cell only reads its text after the dense one is measured, and each would fail by itself.
    check_sources(grid.calibration, *grid.measures.texts())
    check_folder(output)
    placed: dict[str, Any] = {"device": device, "device_map": device_map}
    context = Bench(source, tokenizer, dtype, placed, grid, Path(output), keep, progress)
    named, model = context.dense.name, context.dense.model
    dtype = str(dtype).removeprefix("torch.")  # as the command line has it
    made = provenance(model=named, dtype=dtype, device=str(model.device), **asdict(grid))
    name = f"{Path(named).name} ({title})" if title else Path(named).name
    about: dict[str, Any] = {"paper": paper}
    about["command"] = lambda one: cell_command(one, grid, named, dtype, **placed)
    for number, cell in enumerate(context.cells, start=1):
        say(f"[{number}/{len(context.cells)}] {cell}: {context.run(cell)}")
        # Written after every cell, of all there are: so a report of an unfinished grid can be had.
        summary = summarize(name, context.cells, context.folder, made, **about)
        write_json(Path(output) / RESULT_FILE, summary)
    return summary


def _data(measures: Measures, calibration: str) -> dict[str, Any]:
    """What is calibrated and measured on, as fields of a grid, with nothing in both."""
    data, text = split(calibration, measures.text)
    assert text is not None
    check_apart(calibration, measures.other_texts)
    return {"calibration": data, "measures": replace(measures, text=text)}


MADE = "made.json"

MadeModel = tuple[Any, dict[str, Any]]  # the model, and what its cell says of how it was made


@dataclass(frozen=True)
class KeptModels:
    """A folder of models; those of another run are found also if this one keeps none."""

    folder: Path
    keeps: bool
    placed: Mapping[str, Any] = field(default_factory=dict)  # where, as the dense model

    def find(self, cell: Cell) -> MadeModel | None:
        """The model of a cell in the dtype it was measured in, if it was kept.

        Raises CheckpointError if its files are damaged.
        """
        path = self.folder / cell.model_name
        if not (path / MADE).is_file():
            return None
        made = read_json(path / MADE, f"remove {path}, and repeat the command")
        return load(path, dtype=cell.config["dtype"], **placement(**self.placed)), made

    def keep(self, cell: Cell, made: MadeModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Write a model and its tokenizer, if models are to be kept."""
        if not self.keeps:
            return
        model, figures = made
        with whole_directory(self.folder / cell.model_name, own=True) as partial:
            write_model(model, partial)
            tokenizer.save_pretrained(partial)
            write_json(partial / MADE, figures)


class Bench:
    """The dense model in its context, and the cells that are made of it."""

    def __init__(
        self,
        source: str | Path | PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        dtype: Any,
        placed: dict[str, Any],
        grid: Grid,
        output: Path,
        keep: bool,
        progress: bool,
    ) -> None:
        self.grid, self.output, self.progress = grid, output, progress
        texts = grid.calibration, *grid.measures.texts()
        check_digests(output, *texts)
        self.models = KeptModels(output / "models", keep, placed)
        reading = CalibrationText(
            grid.calibration, grid.num_windows, grid.window, grid.seed, grid.bos
        )
        self.dense = DenseContext.open(
            source,
            tokenizer,
            dtype=dtype,
            **placed,
            reading=reading,
            kept_in=output,
            progress=progress,
        )
        self.tokens = {name: self.dense.held_out(name) for name in grid.measures.texts()}
        dtype = str(self.dense.model.dtype).removeprefix("torch.")
        self.cells = grid.cells(self.dense.fingerprint, dtype, self.dense.bos)
        note_digests(output, *texts)

    def folder(self, cell: Cell) -> Path:
        """Where a cell is stored."""
        return self.output / "cells" / cell.name

    def run(self, cell: Cell) -> str:
        """Run a cell unless it is finished; one line on how it went.

        An error of the dense cell is raised: every other cell would fail by it as well.
        """
        folder = self.folder(cell)
        result = finished(folder)
        if result is not None:
            return f"{_told(result)}, finished before"
        started = time.monotonic()
        try:
            result = self._result(cell)
        except Exception as error:
            if cell.method is None:
                raise
            kind = "" if isinstance(error, RapError) else f"{type(error).__name__}: "
            message = kind + " ".join(str(error).split())
            record = {"error": message, "traceback": traceback.format_exc()}
            store(folder, cell, error={**record, "provenance": provenance()})
            return f"failed: {message}"
        result["seconds"] = time.monotonic() - started
        store(folder, cell, result=result)
        clear_work(work_folder(folder))
        return f"{_told(result)} ({result['seconds']:.0f} s)"

    def _result(self, cell: Cell) -> dict[str, Any]:
        model: Any = self.dense.model
        made: dict[str, Any] = {}
        if cell.method is not None:
            model, made = self.models.find(cell) or self._make(cell, cell.method)
        asked: dict[str, Any] = {"seed": self.grid.seed, "bos": self.dense.bos}
        asked["progress"] = self.progress
        texts = {name: HeldOut(tokens) for name, tokens in self.tokens.items()}
        texts = texts if cell.method is None else self.texts
        measures = self.grid.measures
        figures = measure(model, self.dense.model, self.dense.tokenizer, texts, measures, **asked)
        return {**made, **figures, "provenance": provenance(**cell.config)}

    def _make(self, cell: Cell, method: Method) -> MadeModel:
        """Cut and recover the model of a cell, from the fitted one on if that was kept."""
        fitted = self.models.find(cell.fitted()) if cell.recover.startswith("fit+") else None
        if fitted is None:
            method.check_model(self.dense.model)
            plan = method.plan(self.dense.model, self.statistics())
            small, share = method.apply(self.dense.model, plan), plan.kept_fraction
        else:
            small, share = fitted[0], fitted[1]["kept_fraction"]
        model, recovery = recover_stage(
            small,
            self.dense.model,
            self.dense.tokenizer,
            cell.recover,
            texts=[self.grid.calibration],
            config=self.grid.distillation(cell.recover),
            fit=self.grid.fit(cell.recover),
            fitted=None if fitted is None else fitted[1]["recovery"],
            seed=self.grid.seed,
            output=self.folder(cell),
            bos=self.dense.bos,
            progress=self.progress,
        )
        # The loss curve is long, and nobody reads it here.
        recovery.get("distillation", {}).pop("history", None)
        made = model, {"kept_fraction": share, "recovery": recovery}
        self.models.keep(cell, made, self.dense.tokenizer)
        return made

    @cached_property
    def texts(self) -> dict[str, HeldOut]:
        """The data that all pruned cells are measured on and compared with, computed once."""
        asked = self.grid.measures, self.dense.bos, self.progress
        return {
            name: HeldOut(tokens, dense_states(self.dense.model, tokens, *asked))
            for name, tokens in self.tokens.items()
        }

    def statistics(self) -> Statistics:
        """What all methods of the grid need, collected once and kept with the cells."""
        return self.dense.statistics_for(cell.method for cell in self.cells if cell.method)


def _told(result: dict[str, Any]) -> str:
    near = f", KL {result['kl']['value']:.3g}" if "kl" in result else ""
    cached = f"{result['kv_bytes_per_token']:,} bytes/token"
    return f"perplexity {result['perplexity']:.2f}{near}, {cached}"


# Flags of `rap compare`, by the fields that they set; those of Measures are all `--measure`.
FLAGS = {
    "align": "--align",
    "calibration": "--calibration",
    "num_windows": "--windows",
    "window": "--window",
    "seed": "--seed",
    "bos": "--bos",
}
DTYPE = "float32"  # the default of `rap compare`


def cell_command(
    cell: Cell,
    grid: Grid,
    model: str,
    dtype: str = DTYPE,
    *,
    device: str = AUTO,
    device_map: str | None = None,
) -> str:
    """`rap compare` for one cell alone (the dense model is measured with any)."""
    method = grid.methods[0] if cell.spec == DENSE else cell.spec
    parts = ["rap", "compare", model, "--methods", method, "--retain", _number(cell.retain)]
    if cell.recover != "none":
        parts += ["--recover", cell.recover]
    for name, value in _changed(grid):
        if name in FLAGS:
            parts += [FLAGS[name], "0" if value is None else str(value)]
    for name, value in grid.recovery.items():
        if grid.applies(name, cell.recover):
            parts += ["--set", f"{name}={_text(value)}"]
    for name, value in _changed(grid.measures):
        parts += ["--measure", f"{name}={_text(value)}"]
    if dtype != DTYPE:
        parts += ["--dtype", dtype]
    if device != AUTO:
        parts += ["--device", device]
    if device_map is not None:
        parts += ["--device-map", device_map]
    return shlex.join([*parts, "-o", "runs/cell"])


def _number(value: float) -> str:
    """As short as it can be and still be that number: another one would be another cell."""
    return f"{value:g}" if float(f"{value:g}") == value else repr(value)


def _changed(settings: Grid | Measures) -> list[tuple[str, Any]]:
    return [
        (field.name, getattr(settings, field.name))
        for field in fields(settings)
        if getattr(settings, field.name) != field.default
    ]


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "null" if value is None else str(value)
