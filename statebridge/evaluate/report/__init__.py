"""The report of a finished run, from its folder alone: `report.html`, one file, and `report.md`."""

from __future__ import annotations

from pathlib import Path

from statebridge.evaluate.report.content import build
from statebridge.evaluate.report.data import Run, load_run, verify
from statebridge.evaluate.report.html import write_html
from statebridge.evaluate.report.md import write_md

__all__ = ["Run", "load_run", "verify", "write_report"]


def write_report(folder: str | Path) -> tuple[Path, Path]:
    """Write both forms of a run's report into its folder, and those of its branches into theirs.

    Returns
    -------
    tuple
        Paths of `report.html` and `report.md`.

    Raises
    ------
    StatebridgeError
        When the folder holds no finished run, or a file in it is damaged.
    """
    run = load_run(Path(folder))
    report = build(run)
    for branch in run.branches().values():
        if branch is not None:
            write_report(branch.folder)
    return write_html(report, run.folder), write_md(report, run.folder)
