"""`statebridge report`: write a run's report again from its folder, or check every figure of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from statebridge.cli.options import Format, FormatOption, print_json


def report(
    run: Annotated[Path, typer.Argument(help="Folder that `statebridge evaluate` wrote.")],
    check: Annotated[
        bool,
        typer.Option(
            "--verify", help="Recompute every figure of result.json instead; exit with 3 when one differs."
        ),
    ] = False,
    format: FormatOption = Format.human,
) -> None:
    """Write report.html and report.md of a run again, or verify its figures.

    [bold]Examples[/bold]

        statebridge report run/

        statebridge report --verify run/
    """
    from statebridge.evaluate.report import load_run, verify, write_report

    if not check:
        html, md = write_report(run)
        if format is Format.json:
            print_json({"html": str(html), "md": str(md)})
        else:
            typer.echo(f"{html}\n{md}")
        return
    differences = verify(load_run(run))
    if format is Format.json:
        print_json({"run": str(run), "differences": differences})
    elif differences:
        typer.echo("\n".join(differences))
    else:
        typer.echo(f"Every figure of {run / 'result.json'} follows from its tables.")
    if differences:
        raise typer.Exit(3)
