"""`statebridge reproduce`: experiments 1 and 2 of the published protocol, from documents to one report.

Shows the plan and the progress on stderr and the verdicts on stdout; what is done is the reproduce room's work. An
interrupted run goes on when it is started again with the same options.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from statebridge.cli.options import DeviceOption, Format, FormatOption, print_json, stage_bars
from statebridge.cli.pair_options import ConfigOption, is_main_process, prepare_device

if TYPE_CHECKING:
    from statebridge.reproduce import SuiteConfig


def reproduce(
    experiment: Annotated[str, typer.Argument(help="e001, e002 or all.")],
    out: Annotated[Path, typer.Option(help="Folder of the run; an interrupted run there goes on.")],
    config: ConfigOption = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="One setting, such as e002.count=16."),
    ] = None,
    source: Annotated[str | None, typer.Option(help="Model that reads; else the config's.")] = None,
    receiver: Annotated[str | None, typer.Option(help="Model that continues; else the config's.")] = None,
    documents: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SET=SOURCE", help="Documents of one set, such as e002=books/; may be repeated."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and stop.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="The whole path on the shipped pair with a few short documents.")
    ] = False,
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Models of the same shapes with random weights; load none."),
    ] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer for random weights; that of the shipped pair by default.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 3 when a gate fails.")] = False,
    device: DeviceOption = "cpu",
    receiver_device: Annotated[
        str | None, typer.Option(help="Device of the receiver, where it is another than the source's.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Dtype of the models; else the config's.")] = None,
    format: FormatOption = Format.human,
) -> None:
    """Run the published experiments and set every figure beside the published one.

    [bold]Examples[/bold]

        statebridge reproduce all --smoke --out runs/smoke

        statebridge reproduce all --config configs/qwen3_5_4b_9b.yaml --out run/ --dry-run

        accelerate launch -m statebridge reproduce all --config configs/qwen3_5_4b_9b.yaml --device cuda --out run/
    """
    from rich.console import Console

    from statebridge.reproduce import open_pair
    from statebridge.reproduce import reproduce as run

    chosen = _settings(config, settings, smoke)
    given = {"source": source, "receiver": receiver, "dtype": dtype, "tokenizer": tokenizer}
    if smoke or (random_weights and tokenizer is None):
        from statebridge.cli.demo import find_checkpoints

        shipped = find_checkpoints(None)
        ends = {"source": str(shipped / "source"), "receiver": str(shipped / "receiver")}
        defaults = {"tokenizer": ends["source"], **(ends if smoke else {})}
        given |= {key: value for key, value in defaults.items() if given[key] is None}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    models = dataclasses.replace(chosen.models, **changes)
    if random_weights:
        models = dataclasses.replace(models, random_weights=True)
    chosen = dataclasses.replace(_with_documents(chosen, documents or ()), models=models)
    if dry_run:
        _print_plan(chosen, experiment, format)
        return
    console = Console(stderr=True, quiet=not is_main_process(), highlight=False)

    def opened() -> Any:
        console.print(f"Loading {models.source} and {models.receiver}")
        return open_pair(models, prepare_device(device), receiver_device and prepare_device(receiver_device))

    with stage_bars(console) as progress:
        manifest = run(chosen, experiment, out, opened, progress=progress, say=console.print)
    if not is_main_process():
        return
    verdicts = _verdicts(manifest)
    if format is Format.json:
        print_json({"out": str(out), "gates": verdicts, "figures": manifest["figures"]})
    else:
        for name, verdict in verdicts.items():
            typer.echo(f"{name}: {verdict}")
        typer.echo(f"\nReport: {out / 'report.html'} and report.md")
    if strict and "fail" in verdicts.values():
        raise typer.Exit(3)


def _settings(config: Path | None, settings: list[str] | None, smoke: bool) -> SuiteConfig:
    from importlib.resources import as_file, files

    from statebridge.config import load_config
    from statebridge.errors import ConfigError
    from statebridge.reproduce import SuiteConfig

    if not smoke:
        return load_config(SuiteConfig, config, settings or ())
    if config is not None:
        raise ConfigError("--smoke has settings of its own; leave --config out, or --smoke.")
    with as_file(files("statebridge.reproduce").joinpath("smoke.yaml")) as shipped:
        return load_config(SuiteConfig, shipped, settings or ())


def _with_documents(config: SuiteConfig, documents: list[str] | tuple[str, ...]) -> SuiteConfig:
    from statebridge.errors import ConfigError
    from statebridge.reproduce import with_sources

    sources = {}
    for item in documents:
        name, equals, where = item.partition("=")
        if not equals or not where:
            raise ConfigError(f"--documents {item!r} must have the form SET=SOURCE, such as e002=books/.")
        sources[name] = where
    return with_sources(config, sources)


def _verdicts(manifest: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for stage, record in manifest["stages"].items():
        outcome = record.get("outcome", {})
        if "passed" in outcome:
            found["restore control"] = "pass" if outcome["passed"] else "fail"
        if outcome.get("status") == "not run":
            found[stage] = f"not run ({outcome['gate']}: {outcome['verdict']})"
        for gate, verdict in outcome.get("gates", {}).items():
            found[f"{stage}, {gate}"] = verdict
    return found


def _print_plan(config: SuiteConfig, experiment: str, format: Format) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from statebridge.reproduce.dry_run import HELD, READ, dry_run

    plan = dry_run(config, experiment)
    if format is Format.json:
        print_json(plan.as_dict())
        return
    console = Console(highlight=False)
    for header, rows in ((READ, plan.read()), (HELD, plan.held())):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        for number, name in enumerate(header):
            table.add_column(name, justify="left" if number == 0 else "right", overflow="fold")
        for row in rows:
            table.add_row(*row, style="bold" if row is rows[-1] else None)
        console.print(table)
    for line in plan.notes():
        console.print(line, soft_wrap=True)
