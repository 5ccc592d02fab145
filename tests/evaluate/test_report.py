"""The report says what `result.json` says, of the right arm, in both of its forms, and nothing that is not there."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import made_run
import numpy as np
import pytest

from statebridge.errors import StatebridgeError
from statebridge.evaluate import palette
from statebridge.evaluate.config import EvaluateConfig
from statebridge.evaluate.palette import label
from statebridge.evaluate.report import load_run, plots, plots_sections, verify, words, write_report

HAND = "calibrated"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("report") / "run"
    made_run.write(made, made_run.full_tables(), HAND, made_run.full_config())
    write_report(made)
    return made


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def markdown(folder: Path) -> str:
    return (folder / "report.md").read_text()


def tables(markdown: str) -> list[list[list[str]]]:
    """Every table as rows of cells, bold marks taken off."""
    found: list[list[list[str]]] = [[]]
    for line in markdown.splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            found[-1].append([cell.strip().strip("*") for cell in cells])
        elif found[-1]:
            found.append([])
    return [table for table in found if table]


def table(markdown: str, *header: str) -> dict[str, list[str]]:
    """The table that begins with these columns: first cell -> the others."""
    (match,) = [t for t in tables(markdown) if t[0][: len(header)] == list(header)]
    return {row[0]: row[1:] for row in match[2:]}


def test_every_arm_shows_its_own_numbers(markdown: str, result: dict[str, Any]) -> None:
    rows = table(markdown, "arm", "NLL")
    assert len(rows) == len(made_run.EXCESS)
    for arm, found in result["arms"].items():
        nll, excess, ncr, top1, tqr, js = rows[label(arm, HAND)]
        for cell, name, digits in (
            (nll, "nll", 3),
            (excess, "excess", 3),
            (ncr, "ncr", 2),
            (top1, "top1", 3),
        ):
            expected = [round(found[name][end], digits) for end in ("estimate", "low", "high")]
            assert [float(x) for x in re.findall(r"-?[\d.]+", cell.replace("−", "-"))] == expected, arm
        assert float(tqr.replace("−", "-")) == round(found["tqr"]["estimate"], 2)
        assert float(js) == round(found["js"]["estimate"], 4)


def test_gates_and_their_inequalities(markdown: str, result: dict[str, Any]) -> None:
    (gates,) = [t for t in tables(markdown) if t[0][0] == "gate"]
    shown = [row for row in gates[2:] if row[0] == ""]
    stored = [row for gate in result["gates"].values() for row in gate["inequalities"]]
    assert [row[3] for row in shown] == [row["verdict"] for row in stored]
    assert [row[2] for row in shown] == [words.interval(row["measured"]) for row in stored]
    wholes = [row[3] for row in gates[2:] if row[0] != ""]
    assert wholes == [gate["verdict"] for gate in result["gates"].values()] == ["pass", "fail"]


def test_verdict_says_where_the_bridge_wins_and_where_not(markdown: str, result: dict[str, Any]) -> None:
    said = {row["tokens"]: words.side(row["difference"]) for row in result["equal_cost"]}
    assert said == {0: "better", 16: "better", 64: "worse"}
    top = markdown.partition("## ")[0]
    (wins,) = re.findall(r"it beats the plain truncated read .*: (.*)\.\n", top)
    (losses,) = re.findall(r"it loses to the plain truncated read .*: (.*)\.\n", top)
    assert re.findall(r"(\w+) \(", wins) == ["none", "16"]
    assert re.findall(r"(\w+) \(", losses) == ["64"]
    assert "alone beats a plain read of the last 16, and loses to a plain read of the last 64 tokens" in top
    assert words.interval(result["arms"][HAND]["excess"]) in top


@pytest.mark.parametrize(
    ("full", "near", "begins"),
    [
        ("fail", "pass", "Do not rely on this bridge: the hand-over does not beat K only."),
        ("inconclusive", "pass", "These documents do not settle whether the hand-over beats K only."),
        ("pass", "pass", "The hand-over carries the prefix's memory and can stand in"),
        ("pass", "fail", "The hand-over carries the prefix's memory, but"),
    ],
)
def test_conclusion_follows_from_the_gates(full: str, near: str, begins: str) -> None:
    rows = [
        {"metric": "handover − kv only", "verdict": full},
        {"metric": "handover − source", "verdict": "undecided"},
    ]
    gates = {"full state": {"verdict": full, "inequalities": rows}, "near native": {"verdict": near}}
    assert words.conclusion({"handover": "TDD", "gates": gates}).startswith(begins)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-2.0, -1.0, "better"),
        (1.0, 2.0, "worse"),
        (-1.0, 1.0, "no clear difference"),
        (None, None, "no clear difference"),
    ],
)
def test_sides(low: float | None, high: float | None, expected: str) -> None:
    assert words.side({"low": low, "high": high}) == expected


def test_further_sections_show_their_numbers(markdown: str, result: dict[str, Any]) -> None:
    recall = table(markdown, "arm", "64")
    assert recall["hand-over (calibrated)"] == ["75 %", "75 %"]
    assert (recall["native"], recall["empty"]) == (["100 %", "100 %"], ["0 %", "0 %"])
    (generation,) = [t for t in tables(markdown) if t[0][0] == "mode"]
    row = next(row for row in generation if row[:2] == ["greedy", "hand-over (calibrated)"])
    assert row[2:] == ["0.67 [0.67, 0.67]", "2.0 [2.0, 2.0]", "0 of 2"]
    kl = table(markdown, "on the validation documents")
    assert kl == {
        "the plan alone": ["0.3000"],
        "with the calibrator": ["0.1500"],
        "calibrator without its part for C": ["0.1600"],
    }
    effects = table(markdown, "effect")
    assert effects["K"] == [words.interval(result["effects"]["K"], 4, sign=True)]
    assert table(markdown, "branch")["long"][2:3] == ["not run"]
    assert "the largest is 2.00 % in layer 1" in markdown


def test_html_is_one_file_and_says_the_same(folder: Path, markdown: str) -> None:
    page = (folder / "report.html").read_text()
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,)', page) == []
    assert "http" not in page
    assert "<b>wrote</b>" not in page  # what models write is text, never markup
    assert "&lt;b&gt;wrote&lt;/b&gt;" in page
    headings = re.findall(r"^## (.*)$", markdown, re.M)
    assert [h.replace("&#39;", "'") for h in re.findall(r"<h2>(.*)</h2>", page)] == headings
    assert len(headings) == 12
    pictures = re.findall(r"\((report_files/.*?\.png)\)", markdown)
    assert page.count("data:image/png") == len(pictures) == 10
    for picture in pictures:
        assert (folder / picture).read_bytes().startswith(b"\x89PNG")
    numbers = re.findall(r"\d\.\d{3} \[[^]]*\]", markdown)
    assert numbers
    assert all(text in page for text in numbers)
    assert "/home/" not in page + markdown


def test_absent_data_leave_no_gap(tmp_path: Path) -> None:
    arms = {name: made_run.EXCESS[name] for name in ("native", "empty", "TDD")}
    config = EvaluateConfig(
        count=12, targets=7, plans=(), windows=(), resamples=50, gates={}, controls=("empty",)
    )
    made_run.write(tmp_path / "run", {"scores": made_run.scores(arms)}, "TDD", config)
    _, path = write_report(tmp_path / "run")
    headings = re.findall(r"^## (.*)$", path.read_text(), re.M)
    assert headings == [
        "Every arm",
        "Position by position",
        "Document by document, and the donor control",
        "Whose numbers these are",
        "Terms",
    ]
    assert not re.search(r"\n\n\n|^#.*\n\n#", path.read_text(), re.M)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    drawn: list[Any] = []
    monkeypatch.setattr(palette, "save", lambda figure, *args: drawn.append(figure))
    return drawn


def bars(axis: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Label of each errorbar line -> its points [N, 2]."""
    return {c.get_label(): np.stack(c.lines[0].get_data(), axis=1) for c in axis.containers}


def test_pictures_show_the_right_arms(folder: Path, result: dict[str, Any], figures: list[Any]) -> None:
    run, found = load_run(folder), result["arms"]
    plots.arms(run)
    nll, excess = figures[-1].axes
    order = [text.get_text() for text in nll.get_yticklabels()]
    for axis, key in ((nll, "nll"), (excess, "excess")):
        shown = {order[int(c.lines[0].get_ydata()[0])]: c.lines[0].get_xdata()[0] for c in axis.containers}
        assert shown == {label(arm, HAND): found[arm][key]["estimate"] for arm in found}
    plots.cost(run)
    lines = bars(figures[-1].axes[0])
    plain, handed = (["empty", "window 16", "window 64"], [HAND, "handover + 16", "handover + 64"])
    for arms, line in zip((plain, handed), lines.values(), strict=True):
        assert line[:, 1].tolist() == [found[arm]["excess"]["estimate"] for arm in arms]
    plots_sections.recall(run)
    lines = bars(figures[-1].axes[0])
    assert lines["hand-over (calibrated)"][:, 1].tolist() == [75, 75]
    plots.documents(run)
    points = figures[-1].axes[0].collections[-1]
    assert points.get_label() == "hand-over (calibrated)"
    expected = np.stack([run.nll[arm].mean(1) for arm in ("native", HAND)], axis=1)
    np.testing.assert_array_equal(points.get_offsets(), expected)


def test_one_arm_one_colour() -> None:
    assert palette.colour(HAND, HAND) == palette.colour("handover") == palette.colour("handover + 4", HAND)
    assert palette.colour("TDD", HAND) != palette.colour("TDD", "TDD") == palette.GOOD
    colours = [
        palette.colour(arm, HAND) for arm in ("native", HAND, "source", "empty", "window 1", "wrong donor")
    ]
    assert len(set(colours)) == 6


def test_verify_passes_and_names_what_was_changed(folder: Path, tmp_path: Path) -> None:
    assert verify(load_run(folder)) == []
    copy = shutil.copytree(folder, tmp_path / "run")
    path = copy / "result.json"
    result = json.loads(path.read_text())
    result["arms"]["TDD"]["ncr"]["low"] += 1e-6
    result["generation"]["greedy"]["empty"]["identical"] = 1
    result["gates"]["near native"]["verdict"] = "pass"
    del result["differences"]["handover − source"]
    path.write_text(json.dumps(result))
    named = [line.partition(":")[0] for line in verify(load_run(copy))]
    assert sorted(named) == [
        "arms.TDD.ncr.low",
        "differences.handover − source",
        "gates.near native.verdict",
        "generation.greedy.empty.identical",
    ]


@pytest.mark.parametrize("name", ["config.yaml", "result.json", "scores.parquet"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_damaged_runs_are_refused_by_name(folder: Path, tmp_path: Path, name: str, damage: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "run")
    path = copy / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(StatebridgeError, match=name):
        load_run(copy)
