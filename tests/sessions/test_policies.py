"""Each policy on cases small enough to be worked out by hand."""

from __future__ import annotations

import contextlib

import pytest

from statebridge.errors import BudgetError
from statebridge.sessions import SessionRuntime
from statebridge.sessions.policies import (
    LRU,
    TTL,
    GreedyDualSize,
    Pinned,
    Policy,
    PredictiveAdmission,
    PredictiveShrinking,
    Relevance,
    Resident,
)

# a was used first and is large, b was marked, c was used last
A = Resident("a", nbytes=100, turn=1, used_at=1.0)
B = Resident("b", nbytes=10, turn=2, used_at=2.0, relevance=1.0, growth=5.0)
C = Resident("c", nbytes=50, turn=3, used_at=3.0, growth=20.0)
ALL = (A, B, C)


def order(policy: Policy, sessions=ALL) -> str:
    """Ids in the order in which they leave."""
    for session in sorted(sessions, key=lambda s: s.turn):
        policy.used(session)
    return "".join(s.id for s in sorted(sessions, key=policy.value))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (LRU(), "abc"),
        (TTL(5), "abc"),
        (GreedyDualSize(), "acb"),
        (GreedyDualSize(cost=lambda s: s.nbytes), "abc"),  # all are worth the same: the turn decides
        (Relevance(), "acb"),
        (Relevance(scorer=lambda s: -s.turn), "cba"),
        (Pinned(lambda s: False, then=GreedyDualSize()), "acb"),
        (PredictiveShrinking(), "abc"),
        (PredictiveAdmission(then=Relevance()), "acb"),
    ],
)
def test_who_leaves_first(policy, expected) -> None:
    assert order(policy) == expected


def test_greedy_dual_size_lets_small_ones_age() -> None:
    """value = L + 1 / bytes: L rises to the value of who leaves, so newcomers win against those unused since."""
    policy = GreedyDualSize()
    assert order(policy, (A, B)) == "ab"  # 1/100 against 1/10
    policy.left(A)
    policy.left(B)  # L = 1/10
    old = Resident("old", 9, 4, 4.0)
    policy.used(old)  # 1/10 + 1/9
    policy.left(old)  # L = 19/90
    for session in (B, C):
        policy.used(session)
    assert policy.value(C) == pytest.approx((19 / 90 + 1 / 50, 3))
    assert policy.value(B) == pytest.approx((19 / 90 + 1 / 10, 2))
    policy.forgot(B)  # closed, not pushed out: the level stays
    policy.used(A)
    assert policy.value(A) == pytest.approx((19 / 90 + 1 / 100, 1))


def test_time_to_live() -> None:
    assert list(TTL(1.5).due(ALL, now=4.0, budget=0)) == ["a", "b"]
    assert list(TTL(1.5, then=TTL(0.5)).due(ALL, now=4.0, budget=0)) == ["a", "b", "a", "b", "c"]
    assert list(TTL(3).due(ALL, now=4.0, budget=0)) == []


def test_shrinking_goes_by_the_forecast() -> None:
    """In four uses: a 100, b 10 + 20, c 50 + 80; together 260."""
    policy = PredictiveShrinking(horizon=4)
    assert list(policy.due(ALL, 0.0, budget=260)) == []
    assert list(policy.due(ALL, 0.0, budget=259)) == ["a"]
    assert list(policy.due(ALL, 0.0, budget=159)) == ["a", "b"]
    keeping = PredictiveShrinking(horizon=4, then=Pinned(lambda s: s.id == "a"))
    assert list(keeping.due(ALL, 0.0, budget=159)) == ["b", "c"]


def test_admission_goes_by_the_forecast() -> None:
    """A newcomer will be as large as the others on average: 260 + 160 / 3."""
    policy = PredictiveAdmission(horizon=4)
    assert policy.refuses(ALL, 0, budget=314) == ""
    assert "313 bytes are predicted, and the budget is 313" in policy.refuses(ALL, 0, budget=313)
    assert policy.refuses(ALL, 100, budget=360) == ""


def test_a_refused_session_does_not_begin() -> None:
    from toy_runtime import ToyEngine

    run = SessionRuntime(ToyEngine(), None, 1000, 1000, PredictiveAdmission())
    run.new("a")
    run.step(3)
    begun = 1
    with contextlib.suppress(BudgetError):
        while begun < 9:
            run.new(f"s{begun}")
            begun += 1
            run.step(2)
    with pytest.raises(BudgetError, match="refuses another session"):
        run.new("more")
    assert 1 < begun == len(run.usage().on_host) + 1 < 9
