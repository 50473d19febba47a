"""`rap report`: result files to one page, Markdown or HTML."""

from pathlib import Path
from typing import Annotated

import typer

from ..checkpoint.files import check_output_file, whole_file
from ..model.errors import RapError
from ..studies.report.page import html_report
from ..studies.report.report import markdown_report
from . import options
from .options import console

FOLDERS = (Path("results"), Path("benchmarks/results"))
PAGES = {".md": markdown_report, ".html": html_report}


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("report")(report_command)


def report_command(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders of result files, such as the output of `rap compare`; default results "
            "and benchmarks/results."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File to write, .html or .md; default Markdown on the screen."
        ),
    ] = None,
    config: options.ConfigFile = None,
) -> None:
    """Build one page from the tables, and the figures of comparisons, in RESULTS."""
    folders = results or FOLDERS
    for folder in results or ():
        if not folder.is_dir():
            raise RapError(f"there is no folder {folder}: name one that holds result files")
    if output is None:
        typer.echo(markdown_report(folders))
        return
    if output.suffix not in PAGES:
        raise RapError(f"cannot write {output}: a report ends in {' or '.join(PAGES)}")
    check_output_file(output, force=True)
    page = PAGES[output.suffix](folders)
    with whole_file(output) as partial:
        partial.write_text(page, encoding="utf-8")
    console.print(f"wrote {output}")
