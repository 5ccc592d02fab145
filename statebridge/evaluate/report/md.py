"""The report as Markdown, with its pictures as files beside it."""

from __future__ import annotations

from pathlib import Path

from statebridge.evaluate.report.blocks import Report, Section, Table
from statebridge.state.atomic import atomic_file

PICTURES = "report_files"


def write_md(report: Report, folder: Path) -> Path:
    """Write `report.md` and its pictures into a folder; give the path of `report.md`."""
    (folder / PICTURES).mkdir(exist_ok=True)
    for section in report.sections:
        for picture in section.pictures:
            with atomic_file(folder / PICTURES / f"{picture.name}.png") as temporary:
                temporary.write_bytes(picture.png)
    path = folder / "report.md"
    with atomic_file(path) as temporary:
        temporary.write_text(render_md(report), encoding="utf-8")
    return path


def render_md(report: Report) -> str:
    """The text of `report.md`."""
    lines = [f"# {report.title}", "", f"**{report.conclusion}** {report.headline}", ""]
    lines += [f"- {sentence}" for sentence in report.summary] + [""]
    if report.gates:
        lines += ["| gate | inequality | measured | verdict |", "|---|---|---:|---|"]
        for gate in report.gates:
            lines.append(f"| **{gate.name}**: {_cell(gate.meaning)} | | | **{gate.verdict}** |")
            lines += [
                f"| | {_cell(what)} | {measured} | {verdict} |" for what, measured, verdict in gate.rows
            ]
        lines.append("")
    for section in report.sections:
        lines += _section(section)
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Section) -> list[str]:
    lines = [f"## {section.title}", ""]
    for paragraph in section.paragraphs:
        lines += [paragraph, ""]
    if section.pictures:
        lines += [f"![{p.alt}]({PICTURES}/{p.name}.png)" for p in section.pictures] + [""]
    for table in section.tables:
        lines += [*_table(table), ""]
    return lines


def _table(table: Table) -> list[str]:
    kinds = ["---" if i in table.words else "---:" for i in range(len(table.header))]
    lines = [f"| {' | '.join(table.header)} |", f"|{'|'.join(kinds)}|"]
    for number, row in enumerate(table.rows):
        cells = [_cell(cell) for cell in row]
        if number in table.bold:
            cells = [f"**{cell}**" for cell in cells]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
