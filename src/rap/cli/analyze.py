"""`rap analyze`: one question about a dense model, answered with a table, a figure and a file."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..calibration.dense_context import DenseContext
from ..checkpoint.device import say_device
from ..checkpoint.files import check_folder, whole_file, write_json
from ..checkpoint.provenance import provenance
from ..data.digests import check_digests, note_digests
from ..data.held_out import HELD_OUT, split
from ..data.protocol import EVALUATION_WINDOWS
from ..model.errors import RapError
from ..studies.analyses import ANALYSES
from ..studies.analyses.study import Analysis, Study, figure_of
from . import options
from .groups import LoadingOptions, ReadingOptions, WindowOptions, grouped
from .options import console, print_json, print_table

ALL = "all"
FORMATS = ("png", "svg")
MaxWindows = Annotated[int, typer.Option(help="Number of evaluation windows.")]
EvaluateWindow = Annotated[
    int | None,
    typer.Option(help="Tokens per evaluation window; default 2048 or the model's maximum."),
]
STUDY_LOADING = LoadingOptions(dtype="float32")


@grouped
def analyze_command(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(ANALYSES)}; or {ALL}.")],
    model: Annotated[str, typer.Argument(help="Dense directory, Hub ID or GGUF file.")] = "bundled",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory of result files and figures.")
    ] = Path("runs/analysis"),
    figure: Annotated[str, typer.Option(help="Figure format: png or svg.")] = "png",
    *,
    text: WindowOptions,
    evaluate: options.Evaluate = HELD_OUT,
    max_windows: MaxWindows = EVALUATION_WINDOWS,
    evaluate_window: EvaluateWindow = None,
    load: LoadingOptions = STUDY_LOADING,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Answer one question about MODEL: which pairs, which layers, which scores, at what cost.

    Writes analysis-NAME.json, which `rap report` shows, and a figure. Calibration statistics are
    kept there as well, for further questions.
    """
    if name != ALL and name not in ANALYSES:
        raise RapError(f"unknown analysis {name!r}: use one of {', '.join(ANALYSES)} or {ALL}")
    if figure not in FORMATS:
        raise RapError(f"cannot draw a {figure!r} figure: use {' or '.join(FORMATS)}")
    check_folder(output)
    scored = {"num_windows": max_windows, "window": evaluate_window}
    data, dataset = split(text.calibration, None if evaluate == "none" else evaluate)
    if dataset is None:
        raise RapError("an analysis evaluates: name a dataset with --evaluate, or leave it out")
    text, evaluate = replace(text, calibration=data), dataset
    study = _study(model, ReadingOptions(**vars(text), **vars(load)), evaluate, scored, output)
    # What decides the numbers, and so belongs into a result.
    settings: dict[str, Any] = {
        "model": model,
        "calibration": text.calibration,
        "windows": text.windows,
        "window": text.window,
        "evaluate": evaluate,
        "max_windows": max_windows,
        "evaluate_window": study.window,
        "dtype": load.dtype,
        "device": str(study.model.device),
        "bos": load.bos,
        "seed": load.seed,
    }
    made = {
        "model": model,
        "fingerprint": study.context.fingerprint,
        "bos": study.context.bos,
        "provenance": provenance(**settings),
    }
    to_write = study, output, figure, made
    results = _all(*to_write) if name == ALL else [_answer(ANALYSES[name], *to_write)]
    if as_json:
        print_json(results if name == ALL else results[0])
        return
    for table in (result["table"] for result in results):
        print_table(table["title"], table["header"], table["rows"])
        console.print(table["note"], highlight=False)


def _study(
    model: str, read: ReadingOptions, evaluate: str, scored: dict[str, Any], kept_in: Path
) -> Study:
    """The dense model with its texts, all of them checked before the first measurement."""
    placed: dict[str, Any] = {
        "dtype": read.dtype,
        "device": read.device,
        "device_map": read.device_map,
    }
    check_digests(kept_in, read.text.text)
    context = DenseContext.open(model, **placed, reading=read.text, kept_in=kept_in)
    say_device(context.model)
    tokens = context.held_out(evaluate)
    _ = context.windows  # read, and checked, before the first measurement
    note_digests(kept_in, read.text.text)
    return Study(context, tokens, **scored)


def _all(*to_write: Any) -> list[dict[str, Any]]:
    """Those that can be given: not every model is one that every method is made for."""
    results = []
    for analysis in ANALYSES.values():
        try:
            results.append(_answer(analysis, *to_write))
        except RapError as error:
            console.print(f"left out {analysis.name}: {error}", highlight=False, soft_wrap=True)
    if not results:
        raise RapError("no analysis supports this model; the reasons are listed above")
    return results


def _answer(
    analysis: Analysis, study: Study, output: Path, figure: str, made: dict[str, Any]
) -> dict[str, Any]:
    """Measure, write the result and its figure, and say where they are."""
    data = analysis.measure(study)
    command = made["provenance"]["command"] or f"rap analyze {analysis.name} {made['model']}"
    result = {
        "analysis": analysis.name,
        "question": analysis.question,
        "table": analysis.table(data),
        "data": data,
        "command": command,
        **made,
    }
    path = output / f"analysis-{analysis.name}.json"
    write_json(path, result)
    drawn = path.with_suffix(f".{figure}")
    with whole_file(drawn) as partial:
        figure_of(analysis, data).savefig(partial, format=figure, dpi=160)
    console.print(f"wrote {path} and {drawn}")
    return result
