"""`statebridge report`: write a run's report again from its folder, or check every figure of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from statebridge.cli.options import Format, FormatOption, print_json


def report(
    run: Annotated[
        Path, typer.Argument(help="Folder that `statebridge evaluate` or `statebridge reproduce` wrote.")
    ],
    check: Annotated[
        bool,
        typer.Option(
            "--verify", help="Recompute every figure and digest instead; exit with 3 when one differs."
        ),
    ] = False,
    published: Annotated[
        Path | None,
        typer.Option(help="Folder of the published per-document scores; RUN is made from them first."),
    ] = None,
    format: FormatOption = Format.human,
) -> None:
    """Write report.html and report.md of a run again, or verify its figures.

    [bold]Examples[/bold]

        statebridge report run/

        statebridge report --verify run/

        statebridge report --published evidence/ run/
    """
    from statebridge.evaluate.report import load_run, verify, write_report
    from statebridge.reproduce.evidence import write_published
    from statebridge.reproduce.manifest import MANIFEST
    from statebridge.reproduce.report import write_suite_report
    from statebridge.reproduce.verify import verify_suite

    if published is not None:
        write_published(published, run)
    suite = (run / MANIFEST).is_file()
    if not check:
        html, md = write_suite_report(run) if suite else write_report(run)
        if format is Format.json:
            print_json({"html": str(html), "md": str(md)})
        else:
            typer.echo(f"{html}\n{md}")
        return
    differences = verify_suite(run) if suite else verify(load_run(run))
    if format is Format.json:
        print_json({"run": str(run), "differences": differences})
    elif differences:
        typer.echo("\n".join(differences))
    elif suite:
        typer.echo(
            f"Every digest in {run / MANIFEST} holds, and every figure follows from the stored scores."
        )
    else:
        typer.echo(f"Every figure of {run / 'result.json'} follows from its tables.")
    if differences:
        raise typer.Exit(3)
