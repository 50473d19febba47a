"""`rap compare`: methods compared on one model, run by run, with a report at the end.

`rap report` makes one page of result files, Markdown or HTML, or a folder of pages.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..checkpoint.files import check_folder, check_output_file, whole_file
from ..methods.naming import GRAMMAR
from ..model.errors import RapError
from ..recovery.stages import RECOVERIES
from ..runtime.settings import read_settings
from ..studies.compare.measurement import Measures, changed_measures
from ..studies.compare.run import compare
from ..studies.compare.variants import all_variants, parse_names, parse_retains
from ..studies.report.page import INDEX, html_report, markdown_pages
from ..studies.report.report import markdown_report
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
        left = f"{len(failed)} of {number} runs failed: the same command tries them again"
    console.print(f"wrote {report}; {left}")


EXPERIMENTS, BENCHMARKS = Path("experiments"), Path("benchmarks/results")
ARCHIVE = EXPERIMENTS / "archive"  # of finished studies
PAGES = {".md": markdown_report, ".html": html_report}


def report_command(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Result files or directories, such as the output of `rap compare` "
            "[those of experiments/ and benchmarks/results]."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="File to write (.html or .md), or a directory for one page per topic "
            "[Markdown on the screen].",
        ),
    ] = None,
    config: options.ConfigFile = None,
) -> None:
    """Build one page from the tables, and the figures of comparisons, in RESULTS; or several.

    The topics of several pages are those of topics.yaml in their folder, else a page a folder.
    """
    for source in results or ():
        if not source.exists():
            raise RapError(f"there is no {source}: name result files, or folders that hold them")
    sources = results or default_sources(Path())
    if output is None:
        typer.echo(markdown_report(sources))
    elif output.is_dir() or not output.suffix:
        check_folder(output)
        for name, text in markdown_pages(sources, output).items():
            _write(output / name, text)
        console.print(f"wrote {output / INDEX} and the pages beside it")
    elif output.suffix in PAGES:
        check_output_file(output, force=True)
        _write(output, PAGES[output.suffix](sources))
        console.print(f"wrote {output}")
    else:
        raise RapError(f"cannot write {output}: a report ends in {' or '.join(PAGES)}")


def default_sources(root: Path) -> list[Path]:
    """Every experiment of a checkout, archived ones first, and its benchmarks' results."""
    found = [*(root / EXPERIMENTS).glob("*"), *(root / ARCHIVE).glob("*")]
    experiments = sorted(path for path in found if path.is_dir() and path != root / ARCHIVE)
    return [*experiments, *([root / BENCHMARKS] if (root / BENCHMARKS).is_dir() else [])]


def _write(path: Path, text: str) -> None:
    with whole_file(path) as partial:
        partial.write_text(text, encoding="utf-8")
