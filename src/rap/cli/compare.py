"""`rap compare`: methods compared on one model, run by run, with a report at the end."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoint.files import whole_file
from ..methods.naming import GRAMMAR
from ..methods.settings import read_settings
from ..recovery.stages import RECOVERIES
from ..studies.compare.measurement import Measures, changed_measures
from ..studies.compare.run import compare
from ..studies.compare.variants import all_variants, parse_names, parse_retains
from ..studies.report.page import html_report
from . import options
from .groups import ReadingOptions, grouped
from .options import console, print_json, print_table, read_figures

REPORT_FILE = "report.html"
GRID_READING = ReadingOptions(dtype="float32")
DEMO_METHODS = ("rap", "rap:paper", "kvpruner", "kvpruner-indexed", "palu", "a3", "random")
DEMO_RETAINS, DEMO_WINDOW = "0.8,0.7,0.5", 512
DEMO_MEASURES = Measures(
    window=512,
    num_windows=12,
    recall_documents=8,
    copy_documents=4,
    decode_context=256,
    decode_steps=12,
)

Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        help=f"Comma list of {GRAMMAR}, such as rap,rap:paper,palu; [all].",
    ),
]
Retains = Annotated[
    str, typer.Option("--retain", help="Comma list of ratios, or first:last:step (0.5:0.9:0.1).")
]
Recovers = Annotated[
    str, typer.Option("--recover", help=f"Comma list of: {', '.join(RECOVERIES)}.")
]
Measured = Annotated[
    list[str] | None,
    typer.Option(
        "--measure",
        help="Measurement setting as name=value (repeatable): "
        f"{', '.join(field.name for field in fields(Measures))}; repeat.",
    ),
]
Changed = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Recovery setting: steps=100 (end to end) or fit.steps=100 (layer-wise); repeatable.",
    ),
]
Align = Annotated[
    int,
    typer.Option(
        "--align",
        help="Head dimensions are multiples of this many channels; 0: the method's default.",
    ),
]
Keep = Annotated[
    bool,
    typer.Option(
        "--keep",
        help="Keep all pruned models in OUTPUT/models, for later measurements and recoveries.",
    ),
]
Demo = Annotated[bool, typer.Option("--demo", help="A small grid on the bundled test model.")]


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What the grid is of."""

    methods: Methods = None
    retain: Retains = "0.7,0.5"
    recover: Recovers = "none"


@grouped
def compare_command(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Local directory, Hub ID or GGUF file.")] = "bundled",
    output: options.Output = Path("runs/compare"),
    *,
    axes: Axes,
    demo: Demo = False,
    keep: Keep = False,
    title: Annotated[str, typer.Option(help="Title of the report.")] = "",
    align: Align = 2,
    read: ReadingOptions = GRID_READING,
    measure: Measured = None,
    changes: Changed = None,
    as_json: options.Json = False,
    config: options.ConfigFile = None,
) -> None:
    """Prune MODEL by every method at every ratio, recover, and evaluate all alike.

    Finished runs are kept in the output folder: a killed or repeated command resumes.
    Exit code 1 if a run failed.
    """
    chosen = None if axes.methods is None else parse_names(axes.methods)
    if demo:
        if chosen is None:
            chosen = tuple(spec for spec in DEMO_METHODS if spec in all_variants())
        if not options.was_given(context, "retain"):
            axes = replace(axes, retain=DEMO_RETAINS)
        if not options.was_given(context, "window"):
            read = replace(read, window=DEMO_WINDOW)
    result = compare(
        model,
        output=output,
        methods=chosen,
        retain=parse_retains(axes.retain),
        recover=parse_names(axes.recover),
        measures=changed_measures(DEMO_MEASURES if demo else Measures(), measure or ()),
        align=align or None,
        calibration=read.calibration,
        num_windows=read.windows,
        window=read.window,
        dtype=read.dtype,
        device=read.device,
        device_map=read.device_map,
        bos=read.bos,
        seed=read.seed,
        recovery=read_settings(changes or ()),
        paper=read_figures(config),
        title=title,
        keep=keep,
        say=console.print,
        progress=True,
    )
    report = output / REPORT_FILE
    with whole_file(report) as partial:
        partial.write_text(html_report([output]), encoding="utf-8")
    _show(result, report, as_json)
    if result["failed"]:
        raise typer.Exit(1)


def _show(result: dict[str, Any], report: Path, as_json: bool) -> None:
    if as_json:
        print_json(result)
    else:
        for table in result["tables"]:
            print_table(table["title"], table["header"], table["rows"])
    failed = result["failed"]
    for cell in failed:
        name = f"{cell['method']} at {cell['retain']:g}, recovery {cell['recover']}"
        console.print(f"failed: {name}: {cell['error']}", style="red")
    left = "the same command again measures only what is missing"
    if failed:
        number = len(failed) + len(result["cells"])
        left = f"{len(failed)} of {number} cells failed: the same command tries them again"
    console.print(f"wrote {report}; {left}")
