"""`statebridge calibrate`: train residuals on top of a bridge's plan and save the calibrated bridge.

Shows progress on stderr and validation KL on stdout; the training is the bridge room's work. An interrupted run goes
on when it is started again with the same options.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from statebridge.cli.options import DeviceOption, DtypeOption, Format, FormatOption, print_json, stage_bars
from statebridge.cli.pair_options import (
    ConfigOption,
    Loading,
    LoadOption,
    ReceiverOption,
    SourceOption,
    is_main_process,
    load_pair,
)

if TYPE_CHECKING:
    from statebridge.bridge import TokenWindow


def calibrate(
    source: SourceOption,
    receiver: ReceiverOption,
    bridge: Annotated[str, typer.Option(help="Folder or hub name of the bridge to build on.")],
    documents: Annotated[
        str, typer.Option(help="To train on: text, .jsonl or .parquet file, folder of such, or hub dataset.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the calibrated bridge.")],
    validation: Annotated[
        str | None,
        typer.Option(help="To stop and choose on; the first documents of --documents by default."),
    ] = None,
    fit_documents: Annotated[int, typer.Option(min=1, help="Documents to train on.")] = 128,
    validation_documents: Annotated[int, typer.Option(min=1, help="Documents to stop and choose on.")] = 32,
    window: Annotated[
        str, typer.Option(help="start, or random for a seeded window of each document.")
    ] = "start",
    plan: Annotated[str | None, typer.Option(help="Plan to build on; the bridge's by default.")] = None,
    config: ConfigOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as max_steps=300."),
    ] = None,
    work_dir: Annotated[
        Path | None,
        typer.Option(
            help="Keeps states and the unfinished training; OUT.work, removed at the end, by default."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of windows, bases and the order of documents.")] = None,
    device: DeviceOption = "cpu",
    load: LoadOption = Loading.together,
    dtype: DtypeOption = "auto",
    format: FormatOption = Format.human,
) -> None:
    """Train a calibrator: low-rank residuals through the frozen receiver, on top of the plan of a bridge.

    Both models read every document once; an interrupted run goes on when it is started again.

    [bold]Examples[/bold]

        statebridge calibrate --source small/ --receiver big/ --bridge bridge/ --documents books/
        --validation more_books/ --config configs/calibrate_reference_pair.yaml --out calibrated/
    """
    from rich.console import Console

    from statebridge.bridge import Bridge, CalibrateConfig, fit_calibrator
    from statebridge.config import load_config
    from statebridge.errors import ConfigError

    if window not in ("start", "random"):
        raise ConfigError(f"--window {window} is neither start nor random.")
    chosen = load_config(CalibrateConfig, config, settings or ())
    if seed is not None:
        chosen = dataclasses.replace(chosen, seed=seed)
    console = Console(stderr=True, quiet=not is_main_process())
    base = Bridge.from_pretrained(bridge)
    base = base.with_plan(plan or base.plan)
    console.print(f"Loading {source} and {receiver}")
    pair = load_pair(source, receiver, device, dtype, load=load)
    counts = {"validation": validation_documents, "fit": fit_documents}
    splits = _windows(
        pair.tokenizer, documents, validation, counts, window, chosen.prefix + chosen.positions, chosen.seed
    )
    scratch = work_dir or out.with_name(f"{out.name}.work")
    if (scratch / "calibration" / "run.json").exists():
        console.print(f"Going on with the run in {scratch}")
    started = time.monotonic()
    with stage_bars(console) as progress:
        done = fit_calibrator(pair, base, splits, chosen, work_dir=scratch, progress=progress)
    if not is_main_process():
        return
    done.save_pretrained(out)
    if work_dir is None:
        shutil.rmtree(scratch, ignore_errors=True)
    seconds, report = time.monotonic() - started, done.config.calibration
    if format is Format.json:
        print_json(
            {
                "bridge": str(out),
                "plan": done.config.plan,
                "seconds": round(seconds, 3),
                "calibration": report,
            }
        )
    else:
        _print(report)
        typer.echo(
            f"\nThe calibrated bridge lies in {out} (plan {done.config.plan}, trained in {seconds:.0f} s)."
        )


def _windows(
    tokenizer: Any,
    documents: str,
    validation: str | None,
    counts: Mapping[str, int],
    window: str,
    length: int,
    seed: int,
) -> dict[Any, list[TokenWindow]]:
    """Documents of both splits; from one source, the validation ones come first."""
    from statebridge.bridge import DocumentsConfig, load_documents, token_windows

    def stream(source: str) -> Any:
        return load_documents(DocumentsConfig(source=source))

    if validation is None:
        count = counts["validation"]
        found = token_windows(stream(documents), tokenizer, length, sum(counts.values()), window, seed)
        return {"validation": found[:count], "fit": found[count:]}
    return {
        split: token_windows(stream(source), tokenizer, length, counts[split], window, seed)
        for split, source in (("validation", validation), ("fit", documents))
    }


def _print(report: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from statebridge.bridge.card import mean_kl

    table = Table("on the validation documents")
    table.add_column("KL, nats", justify="right")
    for name, value in mean_kl(report).items():
        table.add_row(name, f"{value:.5f}")
    chosen = report["chosen"]
    Console().print(table)
    typer.echo(
        f"Chosen: rank {chosen['rank']}, penalty weight {chosen['penalty']:g}, step {chosen['step']}; "
        f"{report['trainable_values']:,} trained values. Evaluate the bridge before you trust it."
    )
