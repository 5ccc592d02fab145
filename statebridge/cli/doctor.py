"""`statebridge doctor`: can this model's state be captured and restored exactly, here and now?"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

import typer

from statebridge.cli.options import (
    DeviceOption,
    DtypeOption,
    Format,
    FormatOption,
    SeedOption,
    print_json,
    progress_bar,
)

if TYPE_CHECKING:
    import torch

    from statebridge.evaluate.restore_control import RestoreControl


def doctor(
    model: Annotated[str, typer.Argument(help="Model folder or hub name.")],
    contexts: Annotated[int, typer.Option(min=1, help="Contexts per length.")] = 16,
    lengths: Annotated[str, typer.Option(help="Prefix lengths.")] = "128,512,1024,4096",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    seed: SeedOption = 0,
    format: FormatOption = Format.human,
) -> None:
    """Run the restore control on a model: one verdict per check, exit code 3 when one fails.

    [bold]Examples[/bold]

        statebridge doctor path/to/model

        statebridge doctor Qwen/Qwen3.5-0.8B --device cuda --dtype bfloat16 --format json

        statebridge doctor path/to/model --contexts 2 --lengths 64,128
    """
    try:
        sizes = sorted({int(part) for part in lengths.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 2:
        raise typer.BadParameter(f"{lengths} is no list of lengths such as 128,512", param_hint="--lengths")

    from statebridge.capture.load import load_model
    from statebridge.evaluate.restore_control import NEXT_TOKENS, restore_control

    loaded, tokenizer = load_model(model, dtype=dtype, device_map=None if device == "cpu" else device)
    ids = context_ids(loaded, tokenizer, contexts, sizes[-1] + NEXT_TOKENS, seed)
    with progress_bar() as progress:
        task = progress.add_task("contexts × lengths", total=contexts * len(sizes))
        control = restore_control(loaded, ids, sizes, step=lambda: progress.advance(task))
    if format is Format.json:
        print_json(dataclasses.asdict(control) | {"passed": control.passed, "model": model})
    else:
        _print(model, control)
    if not control.passed:
        raise typer.Exit(3)


def context_ids(model: Any, tokenizer: Any, contexts: int, length: int, seed: int) -> torch.Tensor:
    """Token ids [contexts, length]: prose where the model has a tokenizer, random ids where not.

    The prose is that of the Python documentation which comes with Python, so that no network is needed;
    contexts begin at random places in it and may overlap.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    vocab = model.get_input_embeddings().weight.shape[0]
    if tokenizer is None:
        return torch.randint(vocab, (contexts, length), generator=generator)
    stream = torch.tensor(tokenizer(_prose(), add_special_tokens=False, verbose=False)["input_ids"])
    stream = stream.repeat(-(-(2 * length) // len(stream)))  # some room for different beginnings
    starts = torch.randint(len(stream) - length + 1, (contexts,), generator=generator)
    return torch.stack([stream[start : start + length] for start in starts.tolist()])


def _prose() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _print(model: str, control: RestoreControl) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{model} ({control.model_type})")
    table = Table("prefix", "contexts", "top-1", "max logit difference")
    for row in control.lengths:
        table.add_row(str(row.length), str(row.contexts), f"{row.top1:.2%}", f"{row.max_difference:g}")
    console.print(table)
    for check in control.checks:
        verdict = "[green]pass[/green]" if check.passed else "[red]FAIL[/red]"
        console.print(f"{verdict}  {check.name}: ", end="")
        console.print(check.detail, markup=False)
