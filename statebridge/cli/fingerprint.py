"""`statebridge sessions fingerprint`: what a language model needs to go on, found by taking its buffers away."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from statebridge.cli.options import DeviceOption, DtypeOption, Format, FormatOption, print_json
from statebridge.errors import ConfigError

if TYPE_CHECKING:
    from statebridge.sessions.fingerprint import Fingerprint


class Group(StrEnum):
    """What is taken away at once."""

    component = "component"
    layer = "layer"


def fingerprint(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a causal language model.")],
    documents: Annotated[
        str, typer.Option(help="Text to read: a file, a folder, or prose that comes along.")
    ] = ("installed"),
    lengths: Annotated[str, typer.Option(help="Tokens read, by commas.")] = "64,256",
    after: Annotated[int, typer.Option(help="Tokens after them whose logits are compared.", min=1)] = 9,
    group: Annotated[Group, typer.Option(help="What is taken away at once.")] = Group.component,
    eps: Annotated[
        float, typer.Option(help="Largest divergence that counts as the same, nats per token.")
    ] = 1e-6,
    reread: Annotated[
        bool, typer.Option("--reread", help="Allow reading the tokens again; they are then enough.")
    ] = False,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    format: FormatOption = Format.human,
) -> None:
    """Measure which buffers of a model's cache are its state, by how much, and how they grow.

    Each buffer is replaced by what a new runtime has, by zeros, and by another session's; the numbers are the
    divergence of the next tokens from a session that never left, in nats per token.

    [bold]Examples[/bold]

        statebridge sessions fingerprint checkpoints/source

        statebridge sessions fingerprint checkpoints/source --group layer --lengths 64,512,4096 --format json
    """
    import torch

    from statebridge.bridge.config import DocumentsConfig
    from statebridge.bridge.documents import load_documents, token_windows
    from statebridge.capture.load import load_model
    from statebridge.sessions.fingerprint.model import by_component, by_layer, fingerprint_model

    tokens = _lengths(lengths)
    loaded, tokenizer = load_model(model, dtype=dtype, device_map=device)
    if tokenizer is None:
        raise ConfigError(f"{model} has no tokenizer, so it cannot read documents; put one into its folder.")
    length = max(tokens) + after
    # long enough pieces of the installed prose; files and folders have no use for the name
    config = DocumentsConfig(source=documents, name=str(8 * length) if documents == "installed" else None)
    windows = token_windows(load_documents(config), tokenizer, length, 4)
    found = fingerprint_model(
        loaded,
        torch.stack([window.ids for window in windows]),
        tokens,
        eps=eps,
        group=by_layer if group is Group.layer else by_component,
        derive=reread,
    )
    if format is Format.json:
        print_json(found.to_json())
    else:
        _print(found)


def _lengths(text: str) -> list[int]:
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] < 4:
        raise ConfigError(f"--lengths {text!r} must be whole numbers from 4, separated by commas.")
    return found


def _print(found: Fingerprint) -> None:
    from rich.console import Console
    from rich.table import Table

    from statebridge.sessions.fingerprint import Role

    header, *rows = found.rows()
    table = Table(*header, box=None)
    for name in header[1:-2]:
        table.columns[header.index(name)].justify = "right"
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.print(table)
    longest = max(found.anchors)
    kept, whole = found.nbytes(longest, Role.NEEDED), found.nbytes(longest)
    console.print(f"\nneeded at {longest:,} tokens: {', '.join(found.needed)}; {kept:,} of {whole:,} bytes")
