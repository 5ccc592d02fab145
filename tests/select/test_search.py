"""Finer plans: found by greedy search, and believed only where held-out documents confirm them."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from statebridge.errors import ConfigError, StatebridgeError
from statebridge.select import Plan, layer_groups, search
from statebridge.stats import Bootstrap, ScoreTable

HOLDS = [frozenset("RC"), frozenset("RC"), frozenset("K"), frozenset("RC"), frozenset("K")]
QUICK = Bootstrap(seed=0, resamples=500)


class World:
    """Scores that are native plus a cost for each (layer, component), translated or copied."""

    def __init__(self, gains: dict[tuple[int, str], float], noise: float = 0.0, documents: int = 12) -> None:
        self.gains, self.noise, self.documents = gains, noise, documents
        self.calls: list[list[str]] = []

    def __call__(self, plans: list[Plan]) -> ScoreTable:
        self.calls.append([str(plan) for plan in plans])
        native = np.linspace(2, 3, self.documents)
        columns = {"native": native}
        for plan in plans:
            rng = np.random.default_rng(zlib.crc32(str(plan).encode()))
            gain = sum(g for (layer, c), g in self.gains.items() if plan.translates(layer, c))  # type: ignore[arg-type]
            columns[str(plan)] = native + 1 - gain + rng.normal(0, self.noise or 1e-9, self.documents)
        return ScoreTable.from_columns(range(self.documents), columns)


def test_greedy_search_finds_the_layers_where_a_flip_helps() -> None:
    world = World({(0, "R"): 0.1, (1, "R"): -0.2, (3, "C"): 0.05, (2, "K"): 0.3, (4, "K"): -0.1})
    found = search(world, world, Plan.parse("TDD"), layer_groups(5, 1), HOLDS, bootstrap=QUICK)
    wanted = {(0, "R"), (3, "C"), (2, "K")}
    assert {
        (layer, c) for layer, held in enumerate(HOLDS) for c in held if found.plan.translates(layer, c)
    } == wanted
    assert found.difference is not None
    assert found.difference.estimate == pytest.approx(-0.25, abs=1e-6)
    assert "beats TDD on 12 held-out documents" in found.reason
    scored = [plan for call in world.calls[:-1] for plan in call]
    assert len(scored) == len(set(scored)) == found.scored  # nothing is scored twice
    assert len(found.path) == len(set(found.path)) == 4  # three flips lead from TDD to the best plan


def test_groups_flip_together() -> None:
    world = World({(0, "R"): 0.1, (1, "R"): 0.1, (3, "R"): -0.5})
    found = search(world, world, Plan.parse("DDD"), [(0, 1), (2, 3, 4)], HOLDS, bootstrap=QUICK)
    assert str(found.plan) == "0-1:DTD,2-4:DDD"


def test_a_finer_plan_that_held_out_documents_do_not_confirm_is_not_used() -> None:
    held_out = World({}, noise=0.5)
    found = search(
        World({(0, "R"): 0.1}), held_out, Plan.parse("DDD"), layer_groups(5, 1), HOLDS, bootstrap=QUICK
    )
    assert str(found.finer) == "0:DTD,1-4:DDD"
    assert found.plan == Plan.parse("DDD")
    assert "does not clearly beat" in found.reason


def test_a_finer_plan_that_is_clearly_worse_on_held_out_documents_is_not_used() -> None:
    found = search(
        World({(0, "R"): 0.1}),
        World({(0, "R"): -0.1}),
        Plan.parse("DDD"),
        layer_groups(5, 1),
        HOLDS,
        bootstrap=QUICK,
    )
    assert found.difference is not None
    assert found.difference.low > 0
    assert found.plan == Plan.parse("DDD")


def test_flips_within_their_share_of_the_tie_width_are_no_reason_to_translate_more() -> None:
    world = World({(0, "R"): 0.0015})  # a fifth of 0.01 is 0.002
    found = search(world, world, Plan.parse("DDD"), layer_groups(5, 1), HOLDS, bootstrap=QUICK)
    assert found.plan == Plan.parse("DDD")
    assert found.difference is None
    assert len(world.calls) == 2
    assert (
        str(search(world, world, Plan.parse("DDD"), layer_groups(5, 1), HOLDS, tie_width=0.0).plan) != "DDD"
    )


def test_other_documents_in_a_later_call_are_refused() -> None:
    world = World({(0, "R"): 0.1})

    def shrinking(plans: list[Plan]) -> ScoreTable:
        world.documents -= 1
        return world(plans)

    with pytest.raises(StatebridgeError, match="other documents"):
        search(shrinking, world, Plan.parse("DDD"), layer_groups(5, 1), HOLDS)


@pytest.mark.parametrize("groups", [[], [(0, 5)], [(0, 1), (1, 2)]])
def test_wrong_groups_are_refused(groups: list[tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError):
        search(World({}), World({}), Plan.parse("DDD"), groups, HOLDS)


def test_layer_groups_cover_all_layers() -> None:
    assert layer_groups(5, 2) == ((0, 1), (2, 3), (4,))
