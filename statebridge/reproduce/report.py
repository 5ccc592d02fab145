"""The report of a whole reproduction: `report.html` and `report.md`, from the run's folder alone.

Every figure of ours stands beside the published one, both with their intervals. The pages are made of the same
parts and templates as those of an evaluation, whose own reports lie in the folders of the stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from statebridge.errors import StatebridgeError
from statebridge.evaluate.report import Run, load_run
from statebridge.evaluate.report.blocks import Gate, Report, Section
from statebridge.evaluate.report.content import arms_section, effects_section, gate_block, short
from statebridge.evaluate.report.further import calibration_section, residuals_section
from statebridge.evaluate.report.html import write_html
from statebridge.evaluate.report.md import write_md
from statebridge.evaluate.report.words import conclusion, headline
from statebridge.reproduce import report_sections
from statebridge.reproduce.stages import read_json

_TITLES = {"e001": "Experiment 1", "e002": "Experiment 2", "selection": "Selection", "long": "Longer prefix"}


@dataclass(frozen=True)
class SuiteRun:
    """A run of the suite as its report sees it.

    Attributes
    ----------
    folder
        Where it lies.
    manifest
        The content of `manifest.json`.
    """

    folder: Path
    manifest: Mapping[str, Any]

    @cached_property
    def runs(self) -> dict[str, Run]:
        """Stage -> evaluation, of every one that is finished."""
        names = ["e001", "selection", "e002", "long"]
        names += sorted(f"shifted/{path.name}" for path in self.folder.glob("shifted/*"))
        return {
            name: load_run(self.folder / name)
            for name in names
            if (self.folder / name / "result.json").exists()
        }

    @cached_property
    def restore(self) -> dict[str, Any]:
        """Model -> result of the restore control; empty where it was not run."""
        path = self.folder / "restore" / "restore.json"
        return read_json(path) if path.exists() else {}

    @cached_property
    def selection(self) -> dict[str, Any]:
        """The chosen plan and its reasons; empty where none was chosen."""
        path = self.folder / "selection" / "selection.json"
        return read_json(path) if path.exists() else {}

    @property
    def judged(self) -> Run:
        """The evaluation that the verdict is about: experiment 2's where there is one."""
        for name in ("e002", "e001"):
            if name in self.runs:
                return self.runs[name]
        raise StatebridgeError(
            f"{self.folder} holds no finished evaluation; run `statebridge reproduce` there to its end."
        )


def title(stage: str) -> str:
    """A stage as readers see it."""
    return _TITLES.get(stage, f"Shifted domain {stage.rpartition('/')[2]}")


def write_suite_report(folder: Path) -> tuple[Path, Path]:
    """Write both forms of the report of a run's folder.

    Raises
    ------
    StatebridgeError
        When the folder holds no finished evaluation, or a file in it is damaged.
    """
    run = SuiteRun(folder, read_json(folder / "manifest.json"))
    report = build(run)
    return write_html(report, folder), write_md(report, folder)


def build(run: SuiteRun) -> Report:
    """The report of a run."""
    judged = run.judged
    ends = [short(judged.result["provenance"][end]["name"] or end) for end in ("source", "receiver")]
    return Report(
        title=f"{'Reproduction' if run.manifest['stages'] else 'Published scores'}: {ends[0]} to {ends[1]}",
        conclusion=conclusion(judged.result),
        headline="; ".join(
            f"{title(name)}: {headline(found.result).rstrip('.').removeprefix('Gates: ')}"
            for name, found in run.runs.items()
            if found.result["gates"]
        )
        + ".",
        summary=tuple(report_sections.summary(run.manifest, run.selection, judged)),
        gates=tuple(_gates(run)),
        sections=tuple(section for section in _sections(run) if section is not None),
    )


def _gates(run: SuiteRun) -> Iterator[Gate]:
    if run.restore:
        yield report_sections.restore_gate(run.restore)
    for name, found in run.runs.items():
        for gate, result in found.result["gates"].items():
            block = gate_block(gate, result, found.handover)
            if gate == "full state" and not any("source" in row["metric"] for row in result["inequalities"]):
                block = dataclasses.replace(
                    block, meaning="the whole state matters, and it is the right document's"
                )
            yield dataclasses.replace(block, name=f"{title(name)}, {gate}")


def _sections(run: SuiteRun) -> Iterator[Section | None]:
    yield from report_sections.published(run.manifest["figures"])
    if run.selection:
        yield report_sections.selection(run.selection)
    if "selection" in run.runs:
        yield _named(effects_section(run.runs["selection"]), "selection")
    if "e002" in run.runs:
        yield calibration_section(run.runs["e002"])
        yield residuals_section(run.runs["e002"])
    for name in ("e001", "e002"):
        if name in run.runs:
            yield _named(arms_section(run.runs[name]), name)
    if run.restore:
        yield report_sections.restore(run.restore)
    others = {title(name): found for name, found in run.runs.items() if name not in ("e001", "selection")}
    if len(others) > 1:
        yield report_sections.domains(others)
    yield report_sections.branch(run.manifest["stages"].get("long"))
    yield report_sections.costs(run.manifest["stages"])
    yield report_sections.identities(run.manifest)


def _named(section: Section | None, name: str) -> Section | None:
    """A section of one of several evaluations: its title and pictures say which."""
    if section is None:
        return None
    pictures = tuple(
        dataclasses.replace(picture, name=f"{name}_{picture.name}") for picture in section.pictures
    )
    return dataclasses.replace(section, title=f"{title(name)}: {section.title.lower()}", pictures=pictures)
