"""Options that verbs share, and the two forms of output."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


_STAGES = {
    "collect": "Reading documents",
    "fit": "Fitting maps",
    "scores": "Scoring arms",
    "recall": "Recall by depth",
    "generation": "Free-running generation",
    "residuals": "Calibrator's residuals",
    "read documents": "Reading documents",
    "calibrate": "Training the calibrator",
    "ablate": "Ablating the calibrator",
    "draw documents": "Drawing documents",
    "restore control": "Restore control",
}


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


@contextmanager
def stage_bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A progress function with one bar per stage on `console`, and what the library logs above the bars."""
    from rich.logging import RichHandler
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:<23}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    handler = RichHandler(
        console=console, show_time=False, show_level=False, show_path=False, highlighter=None
    )
    logger = logging.getLogger("statebridge")
    level = logger.level
    with Progress(*columns, console=console, disable=console.quiet) as bars:
        tasks: dict[str, Any] = {}
        reached: dict[str, int] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks or done < reached[stage]:  # the same kind of work, begun again
                words = _STAGES.get(stage, stage[:1].upper() + stage[1:])
                tasks[stage] = bars.add_task(words, total=total)
            bars.update(tasks[stage], completed=done, total=total)
            reached[stage] = done

        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield progress
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
