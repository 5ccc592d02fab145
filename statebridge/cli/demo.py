"""`statebridge demo`: the shipped pair takes one installed document through the whole path.

Needs no network and no GPU. Steps go to stderr as they happen, the table to stdout; the picture and the numbers
are saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from statebridge.cli.options import Format, FormatOption, print_json

if TYPE_CHECKING:
    from statebridge.evaluate.demo import DemoResult

_PARTS = ("source", "receiver", "bridge")
_STEPS = {
    "source_prefill": "the source reads the prefix",
    "capture": "capture of its state",
    "save": "saving the state to a file",
    "load": "loading it again, digest checked",
    "translate": "translation by the bridge",
    "first_token": "the receiver's first token from it",
    "handover": "hand-over: capture, translation, first token",
    "reread": "re-reading: the receiver reads the prefix, first token",
}


def demo(
    out: Annotated[Path, typer.Option(help="Folder for demo.png and demo.json.")] = Path("demo_output"),
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Folder with source/, receiver/ and bridge/; the shipped one by default."),
    ] = None,
    format: FormatOption = Format.human,
) -> None:
    """Hand 4,096 tokens of an installed document from the shipped source to the shipped receiver.

    [bold]Examples[/bold]

        statebridge demo

        statebridge demo --checkpoints my_pair/ --out my_demo/ --format json
    """
    from rich.console import Console

    from statebridge.bridge import Bridge, ModelPair
    from statebridge.evaluate.demo import run_demo
    from statebridge.evaluate.demo_plot import save_demo_plot
    from statebridge.state.atomic import atomic_file

    folder = find_checkpoints(checkpoints)
    out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    console.print(f"Loading source, receiver and bridge from {folder}", highlight=False)
    source, receiver, bridge = (str(folder / part) for part in _PARTS)
    pair = ModelPair.from_pretrained(
        source, receiver, dtype="float32", device_map="cpu", local_files_only=True
    )
    result = run_demo(
        pair, Bridge.from_pretrained(bridge), say=lambda step: console.print(step, highlight=False)
    )
    with atomic_file(out / "demo.png") as temporary:
        save_demo_plot(result, temporary)
    with atomic_file(out / "demo.json") as temporary:
        text = json.dumps(result.as_dict(), indent=1, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")
    if format is Format.json:
        print_json(result.as_dict())
        return
    _print(result)
    typer.echo(f"\nSaved: {out / 'demo.png'} (the picture) and {out / 'demo.json'} (the numbers)")


def find_checkpoints(folder: Path | None) -> Path:
    """The folder of the pair: the given one, `checkpoints/` here, or that of the package's checkout.

    Raises
    ------
    ConfigError
        When no such folder holds source, receiver and bridge.
    """
    import statebridge
    from statebridge.errors import ConfigError

    beside = Path(statebridge.__file__).parents[1] / "checkpoints"
    places = [folder] if folder is not None else [Path("checkpoints"), beside]
    missing = {
        place: [f"{part}/" for part in _PARTS if not (place / part / "config.json").is_file()]
        for place in places
    }
    for place, parts in missing.items():
        if not parts:
            return place
    place, parts = next(iter(missing.items()))
    raise ConfigError(
        f"{place} holds no trained pair ({', '.join(parts)} missing); run the demo inside a checkout of the "
        "project, or give the folder with --checkpoints."
    )


def _print(result: DemoResult) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from statebridge.evaluate.demo import MEANING
    from statebridge.evaluate.palette import label

    console = Console()

    def table(*columns: str, rows: list[list[Any]], right: int = 0, bold: str = "") -> None:
        made = Table()
        for number, name in enumerate(columns):
            made.add_column(name, justify="right" if 0 < number <= right else "left")
        for row in rows:
            made.add_row(*(escape(str(cell)) for cell in row), style="bold" if row[0] == bold else None)
        console.print(made)

    seconds = result.seconds
    console.print(
        f"\n[bold]{result.prefix_tokens:,} tokens of {escape(result.document)}, plan {result.plan}[/bold]\n"
        f"Time to the receiver's first token: {_time(seconds['handover'])} by hand-over, "
        f"{_time(seconds['reread'])} by re-reading, {result.speedup:.1f} times sooner\n"
        f"Prefix tokens the receiver read: {result.prefix_tokens_processed}\n",
        highlight=False,
    )
    table("step", "time", rows=[[words, _time(seconds[name])] for name, words in _STEPS.items()], right=1)
    moved = [[name, f"{size:,}"] for name, size in result.moved_bytes.items()]
    moved += [["all", f"{sum(result.moved_bytes.values()):,}"], ["state file", f"{result.file_bytes:,}"]]
    table("moved", "bytes", rows=moved, right=1)
    hand = label("handover")
    nll = [[label(arm), f"{value:.3f}", MEANING[arm]] for arm, value in result.nll.items()]
    console.print(f"NLL of the next {result.targets} true tokens, nats per token (lower is better):")
    table("arm", "NLL", "what it is", rows=nll, right=1, bold=hand)
    texts = [["the document", " ".join(result.truth.split())]]
    texts += [[label(arm), " ".join(text.split())] for arm, text in result.continuations.items()]
    table("written by", "continuation", rows=texts, bold=hand)


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:,.1f} ms"
