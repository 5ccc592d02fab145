"""The tie rule, on made-up scores and on the published ones."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from statebridge.errors import ConfigError, StatebridgeError
from statebridge.select import Plan, select
from statebridge.stats import Bootstrap, ScoreTable

EVIDENCE = Path(
    os.environ.get("STATEBRIDGE_EVIDENCE", Path(__file__).resolve().parents[3] / "shared" / "evidence")
)
QUICK = Bootstrap(seed=0, resamples=200)


def table(excesses: dict[str, float], documents: int = 6) -> ScoreTable:
    """Scores whose mean excess over native is exactly the given one (binary fractions)."""
    native = np.arange(documents, dtype=float)
    spread = np.where(np.arange(documents) % 2, 0.25, -0.25)  # cancels in the mean
    arms = {arm: native + spread + value for arm, value in excesses.items()}
    return ScoreTable.from_columns(range(documents), {"native": native, **arms})


@pytest.mark.skipif(not EVIDENCE.is_dir(), reason="no folder of published per-document scores")
def test_published_validation_scores_choose_tdd() -> None:
    with (EVIDENCE / "e002_factorial_validation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    arms = [arm for arm in rows[0] if arm != "document_index"]
    scores = ScoreTable.from_columns(
        [row["document_index"] for row in rows], {arm: [float(row[arm]) for row in rows] for arm in arms}
    )
    found = select(scores, bootstrap=Bootstrap(seed=2026090103))
    assert str(found.plan) == "TDD"
    # the figures are published to six decimals
    assert found.excess["TDT"].estimate == pytest.approx(0.132226, abs=5e-7)
    assert found.excess["TDD"].estimate == pytest.approx(0.133377, abs=5e-7)
    assert found.ties[0] == Plan.parse("TDT")
    assert str(found.effects["K"]) == "−0.0705 [−0.1009, −0.0409]"
    assert found.reason.startswith(
        "TDD has a mean excess of 0.133377, within 0.01 of the smallest (TDT, 0.132226)"
    )
    assert str(select(scores, tie_width=0.0).plan) == "TDT"


def test_the_smallest_excess_wins_outside_a_tie() -> None:
    found = select(table({"DDD": 0.5, "TTT": 0.25, "TDD": 0.375}), ["DDD", "TTT", "TDD"], bootstrap=QUICK)
    assert str(found.plan) == "TTT"
    assert list(found.excess) == ["TTT", "TDD", "DDD"]
    assert found.effects == {}
    assert (
        found.reason == "TTT has the smallest mean excess (0.250000), and no other plan is within 0.01 of it."
    )


def test_among_ties_the_fewest_components_win_then_the_first_in_order() -> None:
    scores = table({"TTT": 0.25, "TDT": 0.3125, "TDD": 0.34375, "DTD": 0.375, "DDD": 0.5})
    found = select(scores, ["TTT", "TDT", "TDD", "DTD", "DDD"], tie_width=0.125, bootstrap=QUICK)
    assert [str(tie) for tie in found.ties] == ["TTT", "TDT", "TDD", "DTD"]  # the boundary belongs to the tie
    assert str(found.plan) == "DTD"
    assert "fewest components (1), as 1 other does, and comes first" in found.reason


def test_per_layer_plans_count_what_layers_hold() -> None:
    holds = [frozenset("RC"), frozenset("K")]
    plans = ["0:TTT,1:DDD", "0:DDD,1:TTT"]  # two translated components, and one
    found = select(table(dict.fromkeys(plans, 0.25)), plans, bootstrap=QUICK, holds=holds)
    assert str(found.plan) == "0:DDD,1:TTT"


def test_one_document_and_identical_arms_have_a_defined_answer() -> None:
    cells = ["DDD", "DDT", "DTD", "DTT", "TDD", "TDT", "TTD", "TTT"]
    found = select(table(dict.fromkeys(cells, 0.25), documents=1), bootstrap=QUICK)
    assert str(found.plan) == "DDD"
    assert len(found.ties) == 8
    assert found.excess["DDD"].high == np.inf
    assert set(found.effects) == {"K", "R", "C", "K×R", "K×C", "R×C", "K×R×C"}


def test_what_cannot_be_chosen_from_is_refused() -> None:
    scores = table({"DDD": 0.5})
    with pytest.raises(StatebridgeError, match="no arm 'TDD'"):
        select(scores, ["DDD", "TDD"])
    with pytest.raises(ConfigError, match="no plan to choose from"):
        select(scores, [])
    with pytest.raises(ConfigError, match="tie width"):
        select(scores, ["DDD"], tie_width=float("nan"))
