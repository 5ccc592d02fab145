"""The published figures of arXiv 2609.25053 come out of this code.

Where the folder of per-document scores is present (environment variable STATEBRIDGE_EVIDENCE, by default
shared/evidence beside the repository), every published point and interval is recomputed to 1e-12. Without
it, those figures that follow from the published arm means alone are recomputed from these means.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from statebridge.stats import (
    Bootstrap,
    Interval,
    ScoreTable,
    difference,
    effects,
    excess,
    improvement_fraction,
    improvement_ratio,
    mean_score,
    ncr,
    ncr_ratio,
    remaining_gap_fraction,
    tqr,
    tqr_ratio,
)

EVIDENCE = Path(
    os.environ.get("STATEBRIDGE_EVIDENCE", Path(__file__).resolve().parents[3] / "shared" / "evidence")
)
needs_evidence = pytest.mark.skipif(
    not EVIDENCE.is_dir(), reason="no folder of published per-document scores"
)
E001, E002 = Bootstrap(seed=2026083103), Bootstrap(seed=2026090103)
CELLS = ("DDD", "DDT", "DTD", "DTT", "TDD", "TDT", "TTD", "TTT")


def _rows(name: str) -> list[dict[str, str]]:
    with (EVIDENCE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _table(name: str) -> ScoreTable:
    rows = _rows(name)
    arms = [arm for arm in rows[0] if arm != "document_index"]
    return ScoreTable.from_columns(
        [row["document_index"] for row in rows], {arm: [float(row[arm]) for row in rows] for arm in arms}
    )


def _median_improvement(table: ScoreTable) -> Interval:
    return E001(
        lambda column: np.median(column, axis=-1), improvement_ratio(table, "full_translated").per_document()
    )


FIGURES_E001: dict[str, Callable[[ScoreTable], Interval]] = {
    "EMPTY_9B_mean_nll": lambda t: mean_score(t, "empty", E001),
    "FULL_SHUFFLED_mean_nll": lambda t: mean_score(t, "full_shuffled", E001),
    "FULL_TRANSLATED_mean_nll": lambda t: mean_score(t, "full_translated", E001),
    "KV_GDN_DIRECT_mean_nll": lambda t: mean_score(t, "kv_gdn_direct", E001),
    "KV_ONLY_mean_nll": lambda t: mean_score(t, "kv_only", E001),
    "NATIVE_9B_mean_nll": lambda t: mean_score(t, "native", E001),
    "SOURCE_4B_mean_nll": lambda t: mean_score(t, "source", E001),
    "full_vs_kv": lambda t: difference(t, "kv_only", "full_translated", E001),
    "full_vs_wrong_donor": lambda t: difference(t, "full_shuffled", "full_translated", E001),
    "kv_vs_empty": lambda t: difference(t, "empty", "kv_only", E001),
    "mean_document_improvement_fraction": lambda t: improvement_fraction(t, "full_translated", E001),
    "median_document_improvement_fraction": _median_improvement,
    "ncr_full": lambda t: ncr(t, "full_translated", E001),
    "ncr_kv": lambda t: ncr(t, "kv_only", E001),
    "tqr": lambda t: tqr(t, "full_translated", E001),
}
FIGURES_E002: dict[str, Callable[[ScoreTable], Interval]] = {
    "BASE_STATE_mean_nll": lambda t: mean_score(t, "base", E002),
    "EMPTY_9B_mean_nll": lambda t: mean_score(t, "empty", E002),
    "JOINT_CORRECTED_mean_nll": lambda t: mean_score(t, "calibrated", E002),
    "JOINT_SHUFFLED_mean_nll": lambda t: mean_score(t, "shuffled", E002),
    "NATIVE_9B_mean_nll": lambda t: mean_score(t, "native", E002),
    "SOURCE_4B_mean_nll": lambda t: mean_score(t, "source", E002),
    "base_minus_corrected": lambda t: difference(t, "base", "calibrated", E002),
    "corrected_excess_nll": lambda t: excess(t, "calibrated", E002),
    "corrected_minus_source": lambda t: difference(t, "calibrated", "source", E002),
    "corrected_minus_wrong_donor": lambda t: difference(t, "calibrated", "shuffled", E002),
    "ncr": lambda t: ncr(t, "calibrated", E002),
    "remaining_gap_reduction": lambda t: remaining_gap_fraction(t, "calibrated", "base", E002),
    "tqr": lambda t: tqr(t, "calibrated", E002),
    "ttt_minus_base": lambda t: difference(t, "TTT", "base", E002),
    **{f"{cell}_mean_nll": (lambda t, cell=cell: mean_score(t, cell, E002)) for cell in CELLS},
}


def _check(row: dict[str, str], interval: Interval) -> None:
    assert interval.estimate == pytest.approx(float(row["point_estimate"]), abs=1e-12), row["metric"]
    assert interval.n == int(row["sample_count"])
    if row["ci95_low"]:
        assert interval.low == pytest.approx(float(row["ci95_low"]), abs=1e-12), row["metric"]
        assert interval.high == pytest.approx(float(row["ci95_high"]), abs=1e-12), row["metric"]


@needs_evidence
@pytest.mark.parametrize(
    ("experiment", "file", "figures"),
    [("E001", "e001_per_document.csv", FIGURES_E001), ("E002", "e002_per_document.csv", FIGURES_E002)],
)
def test_every_published_summary_figure(experiment: str, file: str, figures: dict) -> None:
    """All points and intervals, to 1e-12, and none left out."""
    table = _table(file)
    rows = [row for row in _rows("published_summary.csv") if row["experiment"] == experiment]
    assert {row["metric"] for row in rows} == set(figures)
    for row in rows:
        _check(row, figures[row["metric"]](table))


@needs_evidence
@pytest.mark.parametrize(
    ("split", "file"),
    [("VALIDATION", "e002_factorial_validation.csv"), ("LOCKED", "e002_per_document.csv")],
)
def test_every_published_effect(split: str, file: str) -> None:
    """All main effects and interactions of both splits, to 1e-12, and none left out."""
    computed = effects(_table(file), E002, factors=("KV", "recurrent", "convolution"))
    published = {row["metric"]: row for row in _rows("published_effects.csv") if row["split"] == split}
    assert len(published) == len(computed) == 7
    named = {frozenset(name.split("×")): interval for name, interval in computed.items()}
    for metric, row in published.items():
        _check(row, named[frozenset(metric.split("_x_"))])


@needs_evidence
@pytest.mark.parametrize(
    ("file", "check", "arm"),
    [
        ("e001_per_document.csv", "check_e001_ratios.csv", "full_translated"),
        ("e002_per_document.csv", "check_e002_ratios.csv", "calibrated"),
    ],
)
def test_every_published_ratio_per_document(file: str, check: str, arm: str) -> None:
    """Per document, to 1e-12 relative; blank where the denominator is not positive."""
    table, rows = _table(file), _rows(check)
    columns = {"ncr": ncr_ratio(table, arm), "tqr": tqr_ratio(table, arm)}
    if "improvement_fraction" in rows[0]:
        columns["improvement_fraction"] = improvement_ratio(table, arm)
    for name, ratio in columns.items():
        published = [float(row[name]) if row[name] else math.nan for row in rows]
        np.testing.assert_allclose(ratio.per_document(), published, rtol=1e-12, atol=1e-12, err_msg=name)


@needs_evidence
def test_the_printed_headline() -> None:
    table = _table("e001_per_document.csv")
    assert str(difference(table, "full_translated", "kv_only", E001)) == "−0.7473 [−0.8047, −0.6921]"


MEANS_E001 = {
    "native": 2.1609158758074045,
    "source": 2.3074115812778473,
    "empty": 3.2456535696983337,
    "kv_only": 3.11527069658041,
    "full_translated": 2.367947632446885,
    "full_shuffled": 3.3161810860037804,
}
MEANS_E002 = {
    "native": 1.9130319516989402,
    "source": 2.0415435840841383,
    "empty": 2.841563619673252,
    "base": 2.0184217002242804,
    "calibrated": 1.9893992878496647,
    "shuffled": 3.177764356136322,
    "DDD": 2.0781946582719684,
    "DDT": 2.079620852135122,
    "DTD": 2.0911695659160614,
    "DTT": 2.0930846175178885,
    "TDD": 2.0184217002242804,
    "TDT": 2.018709315918386,
    "TTD": 2.0462343553081155,
    "TTT": 2.0474684787914157,
}


def _mean_table(means: dict[str, float]) -> ScoreTable:
    return ScoreTable.from_columns(["mean of 64"], {arm: [value] for arm, value in means.items()})


@pytest.mark.parametrize(
    ("metric", "published"),
    [
        ("full_vs_kv", 0.7473230641335249),
        ("full_vs_wrong_donor", 0.9482334535568953),
        ("kv_vs_empty", 0.13038287311792374),
        ("ncr_full", 0.8091411796552747),
        ("ncr_kv", 0.12019760523877746),
        ("tqr", -0.4132274797724475),
    ],
)
def test_figures_of_experiment_1_that_follow_from_means(metric: str, published: float) -> None:
    """Differences and ratios of means need the means only; 1e-12 is their rounding."""
    assert FIGURES_E001[metric](_mean_table(MEANS_E001)).estimate == pytest.approx(published, abs=1e-12)


@pytest.mark.parametrize(
    ("metric", "published"),
    [
        ("base_minus_corrected", 0.02902241237461567),
        ("corrected_excess_nll", 0.07636733615072444),
        ("corrected_minus_source", -0.052144296234473586),
        ("corrected_minus_wrong_donor", -1.1883650682866573),
        ("ncr", 0.9177547317073981),
        ("remaining_gap_reduction", 0.27538174045113567),
        ("tqr", 0.4057554578263965),
        ("ttt_minus_base", 0.029046778567135334),
    ],
)
def test_figures_of_experiment_2_that_follow_from_means(metric: str, published: float) -> None:
    assert FIGURES_E002[metric](_mean_table(MEANS_E002)).estimate == pytest.approx(published, abs=1e-12)


def test_effects_that_follow_from_means() -> None:
    """An effect is linear in the cells, so the published cell means give the published effects."""
    published = {
        "K": -0.052808960899710655,
        "R": 0.02075262274593115,
        "C": 0.0012157461605966091,
        "K×R": 0.015066572465002537,
        "K×C": -0.000909753143787384,
        "R×C": 0.0007176827639341354,
        "K×R×C": 0.0004576500505208969,
    }
    computed = effects(_mean_table(MEANS_E002), E002)
    assert {name: interval.estimate for name, interval in computed.items()} == pytest.approx(
        published, abs=1e-12
    )
