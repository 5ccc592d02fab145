"""Options that verbs share, and the two forms of output."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.progress import Progress


class Format(StrEnum):
    """Form of the output."""

    human = "human"
    json = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Form of the output.")]
SeedOption = Annotated[int, typer.Option(help="Seed of everything random.")]
DeviceOption = Annotated[str, typer.Option(help="Device of the models, for example cpu, cuda or auto.")]
DtypeOption = Annotated[str, typer.Option(help="Dtype of the models; auto is that of the checkpoint.")]


def print_json(value: Mapping[str, Any]) -> None:
    """Write one JSON object to stdout."""
    print(json.dumps(value, indent=2))


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress bar on stderr that leaves nothing behind."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        yield progress
