"""Choose a plan from scores: the smallest mean excess, unless a simpler plan is as good.

    excess of a plan = mean over documents of (score of the plan - score of native)

Every plan within `tie_width` of the smallest excess is a tie; among ties the plan with the fewest translated
components wins, then the first in lexicographic order. Knows score tables and plans, not where scores come
from. Source: arXiv 2609.25053, experiment 2.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from statebridge.errors import ConfigError
from statebridge.select.plan import GLOBAL_PLANS, Plan
from statebridge.state import COMPONENTS, Component
from statebridge.stats import Bootstrap, Interval, ScoreTable, effects, excess


@dataclass(frozen=True)
class Selection:
    """A chosen plan and why it was chosen.

    Attributes
    ----------
    plan
        The winner.
    excess
        Written plan -> mean excess over native with its interval, smallest first.
    effects
        Main effects and interactions of translating K, R and C (negative favours translation), with
        intervals; empty unless all eight global plans were compared.
    ties
        Plans within the tie width of the smallest excess, the smallest first.
    tie_width
        Width of a tie, in the unit of the scores.
    reason
        One sentence.
    """

    plan: Plan
    excess: Mapping[str, Interval]
    effects: Mapping[str, Interval]
    ties: tuple[Plan, ...]
    tie_width: float
    reason: str


def select(
    table: ScoreTable,
    arms: Sequence[str | Plan] = GLOBAL_PLANS,
    native: str = "native",
    tie_width: float = 0.01,
    bootstrap: Bootstrap | None = None,
    holds: Sequence[Collection[Component]] | None = None,
) -> Selection:
    """Choose one of the plans by the tie rule.

    Parameters
    ----------
    table
        Scores of documents, smaller is better, with an arm per plan (named by its written form) and `native`.
    arms
        Plans to choose from.
    native
        Arm that the excess is measured against.
    tie_width
        Excess by which a plan may miss the best one and still count as a tie.
    bootstrap
        Recipe of the intervals; 10,000 resamples of seed 0 when left out. The choice depends on means alone.
    holds
        Components that each layer has, where per-layer plans are compared (see `Plan.translated`).

    Raises
    ------
    ConfigError
        When there is nothing to choose from, an arm is no plan, or the tie width is negative.
    StatebridgeError
        When the table lacks an arm.
    """
    plans = list(dict.fromkeys(Plan.parse(arm) for arm in arms))
    if not plans:
        raise ConfigError("There is no plan to choose from; name at least one arm.")
    if not tie_width >= 0:
        raise ConfigError(f"A tie width of {tie_width} means nothing; use 0 or more.")
    bootstrap = bootstrap or Bootstrap(seed=0)
    found = {plan: excess(table, str(plan), bootstrap, native) for plan in plans}
    ranked = sorted(plans, key=lambda plan: (found[plan].estimate, str(plan)))
    least = found[ranked[0]].estimate
    ties = tuple(plan for plan in ranked if found[plan].estimate - least <= tie_width)
    plan = min(ties, key=lambda tie: (tie.translated(holds), str(tie)))
    return Selection(
        plan=plan,
        excess={str(each): found[each] for each in ranked},
        effects=effects(table, bootstrap, COMPONENTS) if set(GLOBAL_PLANS) <= set(plans) else {},
        ties=ties,
        tie_width=tie_width,
        reason=_reason(plan, ranked[0], ties, found, tie_width, holds),
    )


def _reason(
    plan: Plan,
    best: Plan,
    ties: tuple[Plan, ...],
    found: Mapping[Plan, Interval],
    tie_width: float,
    holds: Sequence[Collection[Component]] | None,
) -> str:
    least = f"{found[best].estimate:.6f}"
    if len(ties) == 1:
        return (
            f"{plan} has the smallest mean excess ({least}), and no other plan is within {tie_width:g} of it."
        )
    fewest = plan.translated(holds)
    rivals = [tie for tie in ties if tie.translated(holds) == fewest]
    simplest = f"translates the fewest components ({fewest})"
    if len(rivals) > 1:
        others = "1 other does" if len(rivals) == 2 else f"{len(rivals) - 1} others do"
        simplest += f", as {others}, and comes first in order"
    if plan == best:
        head = f"{plan} has the smallest mean excess ({least})"
        return f"{head}, and among the {len(ties)} plans within {tie_width:g} of it, it {simplest}."
    return (
        f"{plan} has a mean excess of {found[plan].estimate:.6f}, within {tie_width:g} of the smallest "
        f"({best}, {least}), and among the {len(ties)} plans that are, it {simplest}."
    )
