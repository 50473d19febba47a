"""`rap report`: result files to one Markdown page."""

from pathlib import Path
from typing import Annotated

import typer

from ..analysis.report import markdown_report
from .options import console

FOLDERS = (Path("results"), Path("benchmarks/results"))


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("report")(report_command)


def report_command(
    results: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of result files; default results and benchmarks/results."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default standard output.")
    ] = None,
) -> None:
    """Build one Markdown page from the tables in RESULTS."""
    page = markdown_report(results or FOLDERS)
    if output is None:
        typer.echo(page)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    console.print(f"wrote {output}")
