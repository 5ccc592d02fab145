"""Finer plans than one for all layers: greedy search over layer groups, confirmed on other documents.

A step tries to flip each (group, component) of the plan in hand and applies the tie rule of `select` to
everything scored so far; it ends when the rule stays with a plan that was already tried. The tie width is
shared out among the groups: what a flip in every layer may cost, a flip in one of n groups may cost 1/n of.
The search picks the best of many plans on the validation documents, so a finer plan is believed only where
it beats the global one on held-out documents, with the paired interval below 0. Knows no models: `score` does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from statebridge.errors import ConfigError, StatebridgeError
from statebridge.select.plan import Plan
from statebridge.select.select import select
from statebridge.state import Component
from statebridge.stats import Bootstrap, Interval, ScoreTable, difference
from statebridge.stats.bootstrap import Array

Score = Callable[[list[Plan]], ScoreTable]
"""Scores plans on a fixed set of documents: one arm per written plan, and the native arm."""


@dataclass(frozen=True)
class Search:
    """Outcome of a search.

    Attributes
    ----------
    plan
        The plan to use: the finer one where it is confirmed, else the global one.
    finer
        The plan that the search ended with.
    path
        Plans that the search stood on, the global one first.
    scored
        Number of plans scored on the validation documents.
    difference
        finer - global on the held-out documents; None where the search never left the global plan.
    reason
        One sentence.
    """

    plan: Plan
    finer: Plan
    path: tuple[Plan, ...]
    scored: int
    difference: Interval | None
    reason: str


def layer_groups(layers: int, size: int) -> tuple[tuple[int, ...], ...]:
    """Cut layers 0 … `layers` - 1 into consecutive groups of `size`, the last one perhaps smaller."""
    if size < 1:
        raise ConfigError(f"A group of {size} layers is no group; use 1 or more.")
    return tuple(tuple(range(start, min(start + size, layers))) for start in range(0, layers, size))


def search(
    score: Score,
    held_out: Score,
    start: Plan,
    groups: Sequence[Sequence[int]],
    holds: Sequence[Collection[Component]],
    *,
    native: str = "native",
    tie_width: float = 0.01,
    bootstrap: Bootstrap | None = None,
    max_steps: int = 32,
) -> Search:
    """Search for a plan that beats the global one.

    Parameters
    ----------
    score, held_out
        Score plans on the validation documents and on documents that nothing was chosen on.
    start
        The global plan, as `select` chose it.
    groups
        Layers that are flipped together (see `layer_groups`); each layer at most once.
    holds
        Components that each layer has.
    native, tie_width, bootstrap
        As in `select`.
    max_steps
        Most steps of the search.

    Raises
    ------
    ConfigError
        When a layer does not exist or is in two groups.
    StatebridgeError
        When a score table lacks a plan, or one call has other documents or native scores than another.
    """
    bootstrap = bootstrap or Bootstrap(seed=0)
    members = [layer for group in groups for layer in group]
    if not members or len(set(members)) < len(members) or not set(members) <= set(range(len(holds))):
        raise ConfigError(
            f"The groups {[list(group) for group in groups]} must name layers of 0 … {len(holds) - 1}, each at "
            "most once, and at least one."
        )
    units = [
        (group, component)
        for group in groups
        for component in sorted({c for layer in group for c in holds[layer]})
    ]
    pool = _Pool(score, native)
    path = [start.per_layer(len(holds))]
    pool.add(path)
    for _ in range(max_steps):
        pool.add([path[-1].flipped(group, component) for group, component in units])
        choice = select(
            pool.table(),
            list(pool.columns),
            native,
            tie_width / len(groups),
            Bootstrap(seed=bootstrap.seed, resamples=1),  # steps need means, not intervals
            holds,
        ).plan
        if choice in path:
            break
        path.append(choice)
    finer = path[-1]
    if len(path) == 1:
        reason = f"{start} stays: flipping single groups of layers gave nothing on the validation documents."
        return Search(start, finer, tuple(path), len(pool.columns), None, reason)
    table = held_out([start, finer])
    found = difference(table, str(finer), str(start), bootstrap)
    better = found.high < 0
    verdict = "beats" if better else "does not clearly beat"
    reason = f"{finer} {verdict} {start} on {len(table)} held-out documents: {found}."
    return Search(start if not better else finer, finer, tuple(path), len(pool.columns), found, reason)


class _Pool:
    """Scores of every plan seen so far, on one set of documents."""

    def __init__(self, score: Score, native: str) -> None:
        self.score, self.native = score, native
        self.columns: dict[Plan, Array] = {}
        self.documents: tuple[str, ...] = ()
        self.reference: Array = np.empty(0)

    def add(self, plans: Sequence[Plan]) -> None:
        """Score the plans that are new."""
        new = [plan for plan in dict.fromkeys(plans) if plan not in self.columns]
        if not new:
            return
        table = self.score(new)
        if not self.documents:
            self.documents, self.reference = table.documents, table[self.native]
        if table.documents != self.documents or not np.array_equal(table[self.native], self.reference):
            raise StatebridgeError(
                "Plans were scored on other documents, or against another native arm, than before. Score all "
                "plans of one search on the same documents in the same order."
            )
        self.columns |= {plan: table[str(plan)] for plan in new}

    def table(self) -> ScoreTable:
        """Everything so far as one table."""
        named = {str(plan): column for plan, column in self.columns.items()}
        return ScoreTable.from_columns(self.documents, {self.native: self.reference, **named})
