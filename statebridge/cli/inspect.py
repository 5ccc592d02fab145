"""`statebridge inspect`: what a state file says about itself, read from its header alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from statebridge.cli.options import Format, FormatOption, print_json

if TYPE_CHECKING:
    from statebridge.state import StateFileInfo


def inspect(
    file: Annotated[Path, typer.Argument(help="State file.")], format: FormatOption = Format.human
) -> None:
    """Print the header of a state file. No tensor is read, and the digest is not checked.

    [bold]Examples[/bold]

        statebridge inspect session.safetensors

        statebridge inspect session.safetensors --format json
    """
    from statebridge.state import inspect_state

    info = inspect_state(file)
    if format is Format.json:
        print_json(
            {
                "file": str(info.path),
                "bytes": info.nbytes,
                "digest": info.digest,
                "header": info.header,
                "tensors": {name: {"dtype": d, "shape": s} for name, (d, s) in info.tensors.items()},
            }
        )
    else:
        _print(info)


def _print(info: StateFileInfo) -> None:
    from rich.console import Console
    from rich.table import Table

    header: dict[str, Any] = dict(info.header)
    model = header.get("model", {})
    sizes = header.get("bytes", {})
    rows = {
        "file": f"{info.path} ({info.nbytes:,} bytes)",
        "model": f"{model.get('name') or 'no name'} ({model.get('model_type')})",
        "weights": model.get("weights"),
        "tokens seen": ", ".join(map(str, header.get("seen_tokens", []))),
        "rope deltas": ", ".join(map(str, header.get("rope_deltas", []))),
        "forward passes": ", ".join(map(str, header.get("schedule", []))) or "unknown",
        "bytes": ", ".join(f"{name} {size:,}" for name, size in sizes.items()),
        "layers": _runs(["".join(parts) or "none" for parts in header.get("initialized", [])]),
        "R axes": header.get("recurrent_axes"),
        "C channels": ", ".join(f"{name} {size}" for name, _, size in header.get("conv_layout", [])),
        "made with": ", ".join(f"{name} {value}" for name, value in header.get("backend", [])),
        "digest": info.digest,
    }
    table = Table("", "", show_header=False, box=None)
    table.columns[1].overflow = "fold"  # a digest that is cut short tells nothing
    for name, value in rows.items():
        table.add_row(name, str(value))
    Console(highlight=False, markup=False).print(table)


def _runs(kinds: list[str]) -> str:
    """["CR", "CR", "K"] as "2 × CR, K"."""
    groups: list[list[Any]] = []
    for kind in kinds:
        if groups and groups[-1][1] == kind:
            groups[-1][0] += 1
        else:
            groups.append([1, kind])
    return ", ".join(kind if count == 1 else f"{count} × {kind}" for count, kind in groups)
