"""`rap report`: result files to one Markdown page."""

from pathlib import Path
from typing import Annotated

import typer

from ..analysis.report import markdown_report
from .options import console


def add_commands(app: typer.Typer) -> None:
    """Register this module's commands."""
    app.command("report")(report_command)


def report_command(
    results: Annotated[Path, typer.Argument(help="Folder of result files.")] = Path("results"),
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default standard output.")
    ] = None,
) -> None:
    """Build one Markdown page from the tables in RESULTS."""
    page = markdown_report(results)
    if output is None:
        typer.echo(page)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page, encoding="utf-8")
    console.print(f"wrote {output}")
