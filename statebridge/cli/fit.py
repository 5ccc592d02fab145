"""`statebridge fit`: fit a bridge on documents and save it.

Shows progress on stderr and the tensor errors on stdout; fits and folders are the bridge room's work. An
interrupted run goes on when it is started again with the same options.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from statebridge.cli.options import DeviceOption, DtypeOption, Format, FormatOption, print_json, stage_bars
from statebridge.cli.pair_options import (
    ConfigOption,
    DocumentsOption,
    Loading,
    LoadOption,
    ReceiverOption,
    SourceOption,
    is_main_process,
    load_pair,
)


def fit(
    source: SourceOption,
    receiver: ReceiverOption,
    out: Annotated[Path, typer.Option(help="Folder of the new bridge.")],
    documents: DocumentsOption = None,
    config: ConfigOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as fit_documents=64."),
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(help="Keeps matrices and unfinished moments; OUT.work, removed at the end, by default."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the document windows.")] = None,
    device: DeviceOption = "cpu",
    load: LoadOption = Loading.together,
    dtype: DtypeOption = "auto",
    format: FormatOption = Format.human,
) -> None:
    """Fit the maps that take states of one model to states of another, and save them as a bridge.

    Both models read the documents; an interrupted fit goes on when it is started again.

    [bold]Examples[/bold]

        statebridge fit --source small/ --receiver big/ --documents books/ --out bridge/

        statebridge fit --source Qwen/Qwen3.5-4B-Base --receiver Qwen/Qwen3.5-9B-Base --device cuda
        --config configs/fit_qwen3_5.yaml --set fit_documents=64 --out bridge/

        accelerate launch -m statebridge fit --device cuda --work-dir shared/ …
    """
    from rich.console import Console

    from statebridge.bridge import FitConfig, fit_bridge
    from statebridge.config import load_config

    chosen = load_config(FitConfig, config, settings or ())
    if documents is not None:
        chosen = dataclasses.replace(
            chosen, documents=dataclasses.replace(chosen.documents, source=documents)
        )
    if seed is not None:
        chosen = dataclasses.replace(chosen, seed=seed)
    console = Console(stderr=True, quiet=not is_main_process())
    console.print(f"Loading {source} and {receiver}")
    pair = load_pair(source, receiver, device, dtype, load=load)
    scratch = work_dir or out.with_name(f"{out.name}.work")
    if (scratch / "run.json").exists():
        console.print(f"Going on with the run in {scratch}")
    started = time.monotonic()
    with stage_bars(console) as progress:
        bridge = fit_bridge(pair, config=chosen, work_dir=scratch, progress=progress)
    if not is_main_process():
        return
    bridge.save_pretrained(out)
    if work_dir is None:
        shutil.rmtree(scratch, ignore_errors=True)
    seconds = time.monotonic() - started
    if format is Format.json:
        report = {"bridge": str(out), "plan": bridge.config.plan, "seconds": round(seconds, 3)}
        print_json(report | {"fit": bridge.config.fit})
    else:
        _print_errors(bridge.config.fit["errors"])
        typer.echo(f"\nThe bridge lies in {out} (plan {bridge.config.plan}, fitted in {seconds:.0f} s).")


def _print_errors(errors: dict[str, dict[str, float | None]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from statebridge.bridge.card import mean_errors

    table = Table()
    table.add_column("component")
    for name in ("translated", "copied"):
        table.add_column(name, justify="right")
    for component, (translated, copied) in mean_errors(errors).items():
        table.add_row(component, f"{translated:.3f}", "shapes differ" if copied is None else f"{copied:.3f}")
    typer.echo("Relative tensor error on validation documents (0 is exact, 1 is the mean state):")
    Console().print(table)
    typer.echo("Tensor error does not predict behaviour: evaluate the bridge before you trust it.")
