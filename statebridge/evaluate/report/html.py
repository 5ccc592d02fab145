"""The report as one self-contained HTML file: pictures and style inside, nothing fetched."""

from __future__ import annotations

import base64
from pathlib import Path

import jinja2

from statebridge.evaluate.report.blocks import Report
from statebridge.state.atomic import atomic_file


def write_html(report: Report, folder: Path) -> Path:
    """Write `report.html` into a folder; give its path."""
    path = folder / "report.html"
    with atomic_file(path) as temporary:
        temporary.write_text(render_html(report), encoding="utf-8")
    return path


def render_html(report: Report) -> str:
    """The text of `report.html`."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("statebridge.evaluate.report", "."),
        autoescape=True,  # names of models and documents, and generated text, are anybody's
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    return environment.get_template("report.html.j2").render(report=report)
