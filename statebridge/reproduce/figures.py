"""The figures of both experiments, from stored scores: the same code for a run of ours and for the published scores.

Every figure has the name that the published tables give it, and their sign. A run gives those whose arms it has.
Knows runs of evaluations, no models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from statebridge.evaluate.report import Run, load_run
from statebridge.evaluate.summary import plain, scores_by_arm
from statebridge.select import select
from statebridge.state import COMPONENTS
from statebridge.stats import (
    Bootstrap,
    Interval,
    Ratio,
    ScoreTable,
    cells,
    difference,
    effects,
    excess,
    improvement_ratio,
    mean_score,
    ncr,
    remaining_gap_fraction,
    tqr,
)

#: Name of the effect in the published tables -> in ours.
_EFFECTS = {
    "KV": "K",
    "recurrent": "R",
    "convolution": "C",
    "KV_x_recurrent": "K×R",
    "KV_x_convolution": "K×C",
    "recurrent_x_convolution": "R×C",
    "KV_x_recurrent_x_convolution": "K×R×C",
}


@dataclass(frozen=True)
class Figure:
    """One figure: what it is in words, the arms that it needs, and how it follows from the scores."""

    words: str
    arms: tuple[str, ...]
    compute: Callable[[ScoreTable, Bootstrap], Interval]


def _nll(words: str, arm: str) -> Figure:
    return Figure(f"NLL, {words}", (arm,), lambda t, b: mean_score(t, arm, b))


def _less(words: str, arm: str, other: str) -> Figure:
    return Figure(words, (arm, other), lambda t, b: difference(t, arm, other, b))


def _median_improvement(table: ScoreTable, bootstrap: Bootstrap) -> Interval:
    ratios = _improvement(table).per_document()
    kept = ratios[~np.isnan(ratios)]
    if not len(kept):
        return bootstrap.undefined(0)
    return bootstrap(lambda column: np.median(column, axis=-1), kept)


def _improvement(table: ScoreTable) -> Ratio:
    return improvement_ratio(table, "TTT", kv_only="kv only")


E001: dict[str, Figure] = {
    "NATIVE_9B_mean_nll": _nll("native", "native"),
    "SOURCE_4B_mean_nll": _nll("source continued", "source"),
    "FULL_TRANSLATED_mean_nll": _nll("full translation (TTT)", "TTT"),
    "KV_GDN_DIRECT_mean_nll": _nll("K translated, R and C copied (TDD)", "TDD"),
    "KV_ONLY_mean_nll": _nll("translated K alone", "kv only"),
    "EMPTY_9B_mean_nll": _nll("no prefix", "empty"),
    "FULL_SHUFFLED_mean_nll": _nll("full translation of a wrong donor", "wrong donor"),
    "full_vs_kv": _less("gain by R and C: K alone − full", "kv only", "TTT"),
    "full_vs_wrong_donor": _less("wrong donor − full", "wrong donor", "TTT"),
    "kv_vs_empty": _less("gain by K: no prefix − K alone", "empty", "kv only"),
    "mean_document_improvement_fraction": Figure(
        "share of the K-only excess removed, mean over documents",
        ("TTT", "kv only"),
        lambda t, b: _improvement(t).mean_of_ratios(b),
    ),
    "median_document_improvement_fraction": Figure(
        "the same, median over documents", ("TTT", "kv only"), _median_improvement
    ),
    "ncr_full": Figure("NCR, full translation", ("TTT", "empty"), lambda t, b: ncr(t, "TTT", b)),
    "ncr_kv": Figure("NCR, K alone", ("kv only", "empty"), lambda t, b: ncr(t, "kv only", b)),
    "tqr": Figure("TQR, full translation", ("TTT", "source"), lambda t, b: tqr(t, "TTT", b)),
}


def e002(base: str) -> dict[str, Figure]:
    """Figures of experiment 2 when `base` is the chosen plan."""
    found = {
        "NATIVE_9B_mean_nll": _nll("native", "native"),
        "JOINT_CORRECTED_mean_nll": _nll("calibrated", "calibrated"),
        "BASE_STATE_mean_nll": _nll("the chosen plan alone", base),
        "SOURCE_4B_mean_nll": _nll("source continued", "source"),
        "EMPTY_9B_mean_nll": _nll("no prefix", "empty"),
        "JOINT_SHUFFLED_mean_nll": _nll("calibrated, wrong donor", "wrong donor"),
        "base_minus_corrected": _less("gain by the calibrator: plan − calibrated", base, "calibrated"),
        "remaining_gap_reduction": Figure(
            "share of the plan's excess removed by the calibrator",
            (base, "calibrated"),
            lambda t, b: remaining_gap_fraction(t, "calibrated", base, b),
        ),
        "corrected_excess_nll": Figure(
            "excess, calibrated", ("calibrated",), lambda t, b: excess(t, "calibrated", b)
        ),
        "corrected_minus_source": _less("calibrated − source continued", "calibrated", "source"),
        "corrected_minus_wrong_donor": _less("calibrated − wrong donor", "calibrated", "wrong donor"),
        "ncr": Figure("NCR, calibrated", ("calibrated", "empty"), lambda t, b: ncr(t, "calibrated", b)),
        "tqr": Figure("TQR, calibrated", ("calibrated", "source"), lambda t, b: tqr(t, "calibrated", b)),
        "ttt_minus_base": _less("full translation − the chosen plan", "TTT", base),
    }
    return found | {f"{cell}_mean_nll": _nll(f"plan {cell}", cell) for cell in cells(3)}


def selection() -> dict[str, Figure]:
    """Excess of every plan on the validation documents, from which the plan is chosen."""
    return {
        f"{cell}_excess": Figure(f"excess of the plan {cell}", (cell,), functools.partial(_excess, cell))
        for cell in cells(3)
    }


def _excess(arm: str, table: ScoreTable, bootstrap: Bootstrap) -> Interval:
    return excess(table, arm, bootstrap)


def figures_of(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Experiment -> figure -> words and interval, of everything in a run's folder that is finished."""
    found = {}
    for name in ("e001", "selection", "e002"):
        if (folder / name / "result.json").exists():
            found[name] = _figures(name, load_run(folder / name))
    return found


def table_of(run: Run) -> ScoreTable:
    """Mean NLL of every document under every arm."""
    documents, nll = scores_by_arm(run.tables["scores"], "nll")
    return ScoreTable.from_columns(documents, {arm: values.mean(1) for arm, values in nll.items()})


def choose(run: Run, tie_width: float) -> dict[str, Any]:
    """The plan that the scores of a selection choose, with everything that speaks for it."""
    bootstrap = Bootstrap(run.config.seed, run.config.resamples)
    found = select(table_of(run), tie_width=tie_width, bootstrap=bootstrap)
    return {
        "plan": str(found.plan),
        "reason": found.reason,
        "tie_width": found.tie_width,
        "ties": [str(plan) for plan in found.ties],
        "excess": {plan: plain(interval) for plan, interval in found.excess.items()},
        "effects": {name: plain(interval) for name, interval in found.effects.items()},
    }


def _figures(name: str, run: Run) -> dict[str, dict[str, Any]]:
    table, bootstrap = table_of(run), Bootstrap(run.config.seed, run.config.resamples)
    plan = str(run.result["provenance"]["plan"])
    wanted: Mapping[str, Figure] = {"e001": E001, "selection": selection(), "e002": e002(plan)}[name]
    found = {
        key: {"words": figure.words, **plain(figure.compute(table, bootstrap))}
        for key, figure in wanted.items()
        if {"native", *figure.arms} <= set(table.arms)
    }
    if name != "e001" and set(cells(3)) <= set(table.arms):
        measured = effects(table, bootstrap, COMPONENTS)
        for published, ours in _EFFECTS.items():
            found[published] = {"words": f"effect of translating {ours}", **plain(measured[ours])}
    if name == "e002":
        for key, words in (("top1", "top-1 agreement, calibrated"), ("js", "JS divergence, calibrated")):
            measured_arm = run.result["arms"].get("calibrated", {})
            if key in measured_arm:
                found[key] = {"words": words, **measured_arm[key]}
    return found
