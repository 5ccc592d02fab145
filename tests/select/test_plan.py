"""Plans: written form, coverage, counting."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statebridge.errors import ConfigError
from statebridge.select import GLOBAL_PLANS, Plan

CHOICES = [str(plan) for plan in GLOBAL_PLANS]
GDN, ATTENTION = frozenset("RC"), frozenset("K")


def test_a_global_plan_holds_for_any_layer() -> None:
    plan = Plan.parse("TDD")
    assert plan.uniform
    assert [plan.translates(17, c) for c in ("K", "R", "C")] == [True, False, False]
    assert plan.require_layers(1) is plan.require_layers(99) is plan


def test_groups_choose_per_layer() -> None:
    plan = Plan.parse("0-1:TDD,2:DTT,3-4:DDT")
    assert plan.choices == ("TDD", "TDD", "DTT", "DDT", "DDT")
    assert [plan.translates(layer, "R") for layer in range(5)] == [False, False, True, False, False]
    assert [plan.translates(layer, "C") for layer in range(5)] == [False, False, True, True, True]


@given(st.lists(st.sampled_from(CHOICES), min_size=1, max_size=9))
def test_the_written_form_reads_back(choices: list[str]) -> None:
    plan = Plan(tuple(choices))
    assert Plan.parse(str(plan)) == plan
    assert Plan.parse(plan) is plan


def test_adjacent_equal_groups_are_one() -> None:
    assert Plan.parse("0-1:TDD,2-3:TDD") == Plan.parse("0-3:TDD")
    assert str(Plan.parse("0-1:TDD,2-3:TDD")) == "0-3:TDD"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "TD",
        "TDX",
        "tdd",
        "TDDD",
        "0-3TDD",
        "1-3:TDD",
        "0-3:TDD,5:DDD",
        "0-3:TDD,3:DDD",
        "3-0:TDD",
        "0-1:TDX",
    ],
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        Plan.parse(text)


def test_another_number_of_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lists 3 layers, the model has 4"):
        Plan.parse("0-2:TDD").require_layers(4)


def test_only_components_that_a_layer_holds_count() -> None:
    holds = [GDN, GDN, GDN, ATTENTION]
    assert Plan.parse("TTD").translated() == 2
    assert Plan.parse("TTD").translated(holds) == 4  # R of three layers, K of one
    assert Plan.parse("0-2:TDD,3:DTT").translated(holds) == 0


def test_a_flip_changes_one_component_of_the_named_layers() -> None:
    plan = Plan.parse("TDD").per_layer(4).flipped([1, 3], "R")
    assert plan.choices == ("TDD", "TTD", "TDD", "TTD")
    assert plan.flipped([1, 3], "R") == Plan.parse("TDD").per_layer(4)
