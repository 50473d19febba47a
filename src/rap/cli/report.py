"""`rap report`: result files to one page, Markdown or HTML, or to a folder of pages."""

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.files import check_folder, check_output_file, whole_file
from ..model.errors import RapError
from ..studies.report.page import INDEX, html_report, markdown_pages
from ..studies.report.report import markdown_report
from . import options
from .options import console

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
