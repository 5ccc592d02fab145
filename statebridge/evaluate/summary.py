"""From scores per document, arm and position to intervals, differences and gates.

Knows tables, no models: a stored `scores.parquet` gives the same result again.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pyarrow as pa

from statebridge.evaluate.config import EvaluateConfig, GateConfig
from statebridge.stats import (
    Bootstrap,
    Interval,
    ScoreTable,
    cells,
    difference,
    effects,
    excess,
    mean_score,
    ncr,
    tqr,
)


def scores_by_arm(table: pa.Table, metric: str) -> tuple[list[str], dict[str, np.ndarray[Any, Any]]]:
    """Documents in order, and arm -> [documents, positions] of one metric."""
    documents = list(dict.fromkeys(table["document"].to_pylist()))
    arms = list(dict.fromkeys(table["arm"].to_pylist()))
    positions = int(max(table["position"].to_pylist())) + 1
    row = {name: i for i, name in enumerate(documents)}
    found = {arm: np.full((len(documents), positions), np.nan) for arm in arms}
    columns = (table[name].to_pylist() for name in ("document", "arm", "position", metric))
    for document, arm, position, value in zip(*columns, strict=True):
        found[arm][row[document], position] = value
    return documents, found


def summarise(table: pa.Table, plan: str, config: EvaluateConfig) -> dict[str, Any]:
    """Intervals of every arm, differences of the hand-over to its controls, excess by position, gates.

    Parameters
    ----------
    table
        Columns document, arm, position, nll, and any of top1, kl, js.
    plan
        The arm that is the hand-over.
    config
        Settings of the bootstrap and the gates.
    """
    bootstrap = Bootstrap(config.seed, config.resamples)
    documents, nll = scores_by_arm(table, "nll")
    means = ScoreTable.from_columns(documents, {arm: values.mean(1) for arm, values in nll.items()})
    others = {
        metric: ScoreTable.from_columns(
            documents, {arm: values.mean(1) for arm, values in scores_by_arm(table, metric)[1].items()}
        )
        for metric in ("top1", "kl", "js")
        if metric in table.column_names  # scores from elsewhere may be NLL alone
    }
    arms: dict[str, dict[str, Interval]] = {}
    for arm in nll:
        measured: dict[str, Interval] = {"nll": mean_score(means, arm, bootstrap)}
        measured["excess"] = excess(means, arm, bootstrap)
        if "empty" in nll:
            measured["ncr"] = ncr(means, arm, bootstrap)
        if "source" in nll:
            measured["tqr"] = tqr(means, arm, bootstrap)
        arms[arm] = measured | {
            metric: mean_score(scores, arm, bootstrap) for metric, scores in others.items()
        }
    differences = {
        f"handover − {arm}": difference(means, plan, arm, bootstrap)
        for arm in nll
        if arm not in ("native", plan)
    }
    result: dict[str, Any] = {
        "handover": plan,
        "documents": len(documents),
        "arms": {arm: {name: plain(value) for name, value in found.items()} for arm, found in arms.items()},
        "differences": {name: plain(interval) for name, interval in differences.items()},
        "excess_by_position": {
            arm: (values - nll["native"]).mean(0).round(6).tolist()
            for arm, values in nll.items()
            if arm != "native"
        },
        "equal_cost": _equal_cost(means, plan, bootstrap),
        "gates": {
            name: _gate(inequalities, arms[plan] | differences) for name, inequalities in config.gates.items()
        },
    }
    if set(cells(3)) <= set(nll):
        result["effects"] = {name: plain(value) for name, value in effects(means, bootstrap).items()}
    return result


def _equal_cost(means: ScoreTable, handover: str, bootstrap: Bootstrap) -> list[dict[str, Any]]:
    """The hand-over against the plain truncated read, where the receiver reads as many tokens itself.

    Each row: `tokens` of the prefix that the receiver reads, the two arms, and hand-over − plain read.
    """
    pairs = [(0, handover, "empty")]
    for arm in means.arms:
        if arm.startswith("handover + "):
            tokens = int(arm.removeprefix("handover + "))
            pairs.append((tokens, arm, f"window {tokens}"))
    return [
        {
            "tokens": tokens,
            "handover": ours,
            "plain": theirs,
            "difference": plain(difference(means, ours, theirs, bootstrap)),
        }
        for tokens, ours, theirs in pairs
        if theirs in means.arms
    ]


def verdict(gate: GateConfig, interval: Interval) -> str:
    """ "pass", "fail" or "inconclusive" for one inequality."""
    low, high = interval.low - gate.bound, interval.high - gate.bound
    if gate.relation == ">=":
        low, high = -high, -low
    if np.isnan(interval.estimate):
        return "inconclusive"
    return "pass" if high <= 0 else "fail" if low > 0 else "inconclusive"


def _gate(inequalities: tuple[GateConfig, ...], measured: dict[str, Interval]) -> dict[str, Any]:
    rows = []
    for gate in inequalities:
        interval = measured[gate.metric]
        rows.append(
            {**dataclasses.asdict(gate), "measured": plain(interval), "verdict": verdict(gate, interval)}
        )
    found = {row["verdict"] for row in rows}
    whole = "fail" if "fail" in found else "inconclusive" if "inconclusive" in found else "pass"
    return {"verdict": whole, "inequalities": rows}


def plain(interval: Interval) -> dict[str, Any]:
    """An interval as JSON knows it: None where it is undefined or infinite."""
    return {
        name: None if isinstance(value, float) and not np.isfinite(value) else value
        for name, value in dataclasses.asdict(interval).items()
    }
