"""`statebridge evaluate`: every arm on every document, gates, and a report.

Shows progress on stderr and a compact table of arms and gates on stdout; what is measured is the evaluate room's
work. An interrupted run goes on when it is started again with the same options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from statebridge.cli.options import (
    DeviceOption,
    DtypeOption,
    Format,
    FormatOption,
    print_json,
    stage_bars,
)
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


def evaluate(
    source: SourceOption,
    receiver: ReceiverOption,
    bridge: Annotated[str, typer.Option(help="Folder or hub name of the bridge.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; an interrupted run there goes on.")],
    documents: DocumentsOption = None,
    config: ConfigOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as count=16 or plans=all."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 when a gate fails.")] = False,
    seed: Annotated[int | None, typer.Option(help="Of windows, sampling and bootstrap.")] = None,
    device: DeviceOption = "cpu",
    receiver_device: Annotated[
        str | None, typer.Option(help="Device of the receiver, where it is another than the source's.")
    ] = None,
    load: LoadOption = Loading.together,
    dtype: DtypeOption = "auto",
    format: FormatOption = Format.human,
) -> None:
    """Judge a bridge: every arm on every document, with intervals, gates and a report.

    The folder holds scores.parquet, result.json, report.html and report.md.

    [bold]Examples[/bold]

        statebridge evaluate --source small/ --receiver big/ --bridge bridge/ --documents books/ --out run/

        statebridge evaluate --source small/ --receiver big/ --bridge bridge/ --out run/
        --config configs/evaluate_full.yaml --set count=16 --strict
    """
    from rich.console import Console

    from statebridge.bridge import Bridge
    from statebridge.config import load_config
    from statebridge.evaluate.config import EvaluateConfig
    from statebridge.evaluate.report import write_report
    from statebridge.evaluate.run import evaluate as run

    chosen = load_config(EvaluateConfig, config, settings or ())
    if documents is not None:
        chosen = dataclasses.replace(
            chosen, documents=dataclasses.replace(chosen.documents, source=documents)
        )
    if seed is not None:
        chosen = dataclasses.replace(chosen, seed=seed)
    console = Console(stderr=True, quiet=not is_main_process())
    loaded = Bridge.from_pretrained(bridge)
    console.print(f"Loading {source} and {receiver}")
    pair = load_pair(source, receiver, device, dtype, receiver_device=receiver_device, load=load)
    with stage_bars(console) as progress:
        result = run(pair, loaded, chosen, out=out, progress=progress)
    if not is_main_process():
        return
    console.print("Writing the report")
    html, md = write_report(out)
    if format is Format.json:
        print_json({"out": str(out), **{k: v for k, v in result.items() if k != "excess_by_position"}})
    else:
        _print(result)
        typer.echo(f"\nReport: {html} and {md.name}")
    if strict and any(gate["verdict"] == "fail" for gate in result["gates"].values()):
        raise typer.Exit(3)


def _print(result: Mapping[str, Any]) -> None:
    """Arms and gates as tables on stdout, then the verdict in words."""
    from rich.console import Console
    from rich.table import Table

    from statebridge.evaluate.palette import label
    from statebridge.evaluate.report.words import conclusion, equal_cost, interval, number

    console, hand = Console(), result["handover"]
    arms = Table()
    arms.add_column("arm")
    shown = [name for name in ("nll", "excess", "ncr", "top1") if name in result["arms"][hand]]
    for name in shown:
        arms.add_column({"nll": "NLL", "ncr": "NCR", "top1": "top-1"}.get(name, name), justify="right")
    for arm, found in sorted(result["arms"].items(), key=lambda item: item[1]["nll"]["estimate"]):
        cells = [
            interval(found[name], 3 if name == "excess" else 2)
            if name in ("excess", "ncr")
            else number(found[name]["estimate"])
            for name in shown
        ]
        arms.add_row(label(arm, hand), *cells, style="bold" if arm == hand else None)
    console.print(arms)
    gates = Table("gate", "must hold", "measured", "verdict")
    short = {"nll": "NLL", "ncr": "NCR", "tqr": "TQR", "top1": "top-1", "kl": "KL", "js": "JS"}
    colours = {"pass": "green", "fail": "red", "inconclusive": "yellow"}
    for name, gate in result["gates"].items():
        for i, row in enumerate(gate["inequalities"]):
            relation = "≤" if row["relation"] == "<=" else "≥"
            gates.add_row(
                name if i == 0 else "",
                f"{short.get(row['metric'], row['metric'])} {relation} {row['bound']:g}",
                interval(row["measured"]),
                f"[{colours[row['verdict']]}]{row['verdict']}[/]",
                end_section=i == len(gate["inequalities"]) - 1,
            )
    console.print(gates)
    for sentence in (conclusion(result), *equal_cost(result)):
        console.print(sentence, highlight=False)
