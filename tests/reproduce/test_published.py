"""The published table: shipped with the package, and made again from the published scores by the same code.

The scores lie in a folder that the environment variable STATEBRIDGE_EVIDENCE names, by default shared/evidence beside
the repository; without it only what is shipped is tested.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from statebridge.cli.app import app
from statebridge.errors import DocumentError
from statebridge.reproduce.evidence import write_published
from statebridge.reproduce.figures import E001, e002
from statebridge.reproduce.report_sections import apart, published_figures

EVIDENCE = Path(
    os.environ.get("STATEBRIDGE_EVIDENCE", Path(__file__).resolve().parents[3] / "shared" / "evidence")
)
needs_evidence = pytest.mark.skipif(
    not EVIDENCE.is_dir(), reason="no folder of published per-document scores"
)


def test_every_published_figure_has_a_figure_of_ours() -> None:
    known = published_figures()
    assert set(known["e001"]) == set(E001)
    assert set(e002("TDD")) <= set(known["e002"])
    assert known["e001"]["full_vs_kv"]["estimate"] == pytest.approx(0.7473, abs=5e-5)
    assert known["selection"]["KV"]["low"] == pytest.approx(-0.1009, abs=5e-5)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    result = CliRunner().invoke(app, ["report", "--published", str(EVIDENCE), str(folder)])
    assert result.exit_code == 0, result.output
    return folder


@needs_evidence
def test_the_published_scores_give_the_published_table(run: Path) -> None:
    """All figures and intervals to 1e-12; agreement alone cannot follow from NLL."""
    known = published_figures()
    figures = json.loads((run / "manifest.json").read_text())["figures"]
    assert {name: set(known[name]) - set(found) for name, found in figures.items()} == {
        "e001": set(),
        "selection": set(),
        "e002": {"top1", "js"},
    }
    for name, found in figures.items():
        for key in found.keys() & known[name].keys():
            rounded = key.endswith("_excess") and name == "selection"  # published with six digits
            for part in ("estimate", "low", "high"):
                if known[name][key][part] is not None:
                    tolerance = 5e-7 if rounded else 1e-12
                    assert found[key][part] == pytest.approx(known[name][key][part], abs=tolerance), key


@needs_evidence
def test_the_report_of_the_published_scores_says_what_was_published(run: Path) -> None:
    text = (run / "report.md").read_text()
    assert "Of the eight plans TDD was chosen" in text
    assert "| gain by R and C: K alone − full | 0.7473 [0.6921, 0.8047] | 0.7473 [0.6921, 0.8047] |" in text
    assert "43 overlap with it and 0 lie apart" in text
    assert "carries the prefix's memory, but reading the prefix is measurably better" in text
    assert CliRunner().invoke(app, ["report", "--verify", str(run)]).exit_code == 0


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"e001_per_document.csv cannot be read"):
        write_published(tmp_path, tmp_path / "run")


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ((0.0, -1.0, 1.0), (2.0, 1.0, 3.0), "overlap"),
        ((0.0, -1.0, 1.0), (2.0, 1.1, 3.0), "apart"),
        ((5.0, 4.0, 6.0), (2.0, 1.1, 3.0), "apart"),
        ((0.0, -1.0, 1.0), (0.5, None, None), "published lies inside"),
        ((0.0, -1.0, 1.0), (1.5, None, None), "published lies outside"),
        ((0.0, None, 1.0), (1.5, 1.0, 2.0), "no interval"),
        ((None, None, None), (1.5, 1.0, 2.0), "undefined here"),
    ],
)
def test_agreement_is_that_of_the_intervals(ours: tuple, theirs: tuple, said: str) -> None:
    names = ("estimate", "low", "high")
    assert apart(dict(zip(names, ours, strict=True)), dict(zip(names, theirs, strict=True))) == said
