"""What each policy scores and keeps, against the formula written out; and what is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from pruned_world import FRAME_TOKENS, HEADS, LAYERS, TOKENS

from statebridge.errors import PruneError
from statebridge.prune import (
    POLICIES,
    ChunkRecord,
    DeCoPrune,
    DeCoPruneHS,
    Full,
    HeadSplit,
    Random,
    ReversedDiscrepancy,
    Streaming,
    TemporalDifference,
)

SPLIT = HeadSplit(((True, False, False), (True, True, False)))


def record(seed: int = 0, chunk: int = 3) -> ChunkRecord:
    draw = torch.Generator().manual_seed(11)
    final, probe = (torch.randn(2, TOKENS, 5, generator=draw) for _ in range(2))
    previous = torch.randn(2, FRAME_TOKENS, 5, generator=draw)
    return ChunkRecord(chunk, final, probe, previous, FRAME_TOKENS, torch.Generator().manual_seed(seed))


def test_discrepancy_is_the_mean_square_over_the_values_of_a_token() -> None:
    given = record()
    scores = DeCoPrune(threshold=0.1).score(given)
    by_hand = sum((given.probe[1, 4, i] - given.final[1, 4, i]) ** 2 for i in range(5)) / 5
    torch.testing.assert_close(scores[1, 4], by_hand)  # float32, another order of the sum
    assert scores.shape == (2, TOKENS)


def test_a_threshold_keeps_what_is_strictly_larger() -> None:
    scores = torch.tensor([[0.09, 0.10, 0.11]])
    (mask,) = DeCoPrune(threshold=0.10).keep(scores)
    assert mask.tolist() == [[False, False, True]]
    (nothing,), (everything,) = (DeCoPrune(threshold=t).keep(scores) for t in (math.inf, -math.inf))
    assert not nothing.any()
    assert everything.all()


def test_reversed_keeps_the_other_end() -> None:
    given = record()
    forward, backward = (cls(keep_ratio=1 / 3) for cls in (DeCoPrune, ReversedDiscrepancy))
    (best,), (worst,) = (policy.keep(policy.score(given)) for policy in (forward, backward))
    discrepancy = forward.score(given)
    for row in range(2):
        assert discrepancy[row][best[row]].min() > discrepancy[row][worst[row]].max()


def test_temporal_difference_compares_the_same_place_one_frame_earlier() -> None:
    given = record()
    scores = TemporalDifference(keep_ratio=0.5).score(given)
    inside = (given.final[0, FRAME_TOKENS + 2] - given.final[0, 2]).square().mean()
    across = (given.final[0, 2] - given.previous[0, 2]).square().mean()
    torch.testing.assert_close(scores[0, FRAME_TOKENS + 2], inside)
    torch.testing.assert_close(scores[0, 2], across)
    first = TemporalDifference(keep_ratio=0.5).score(dataclasses.replace(given, previous=None))
    assert first[:, :FRAME_TOKENS].isinf().all()
    assert torch.equal(first[:, FRAME_TOKENS:], scores[:, FRAME_TOKENS:])


def test_random_depends_on_its_generator_alone() -> None:
    policy = Random(keep_ratio=0.5)
    assert torch.equal(policy.score(record(1)), policy.score(record(1)))
    assert not torch.equal(policy.score(record(1)), policy.score(record(2)))


@pytest.mark.parametrize("ratio", [0.0, 0.13, 0.5, 1.0])
@pytest.mark.parametrize("cls", [Random, TemporalDifference, ReversedDiscrepancy, DeCoPrune])
def test_equal_budgets_keep_equally_many_tokens_in_every_row(cls: type, ratio: float) -> None:
    policy = cls(keep_ratio=ratio)
    (mask,) = policy.keep(policy.score(record()))
    assert mask.sum(1).tolist() == [math.floor(ratio * TOKENS + 0.5)] * 2


def test_equal_scores_keep_earlier_tokens() -> None:
    (mask,) = DeCoPrune(keep_ratio=0.5).keep(torch.zeros(1, 6))
    assert mask.tolist() == [[True, True, True, False, False, False]]


def test_head_groups_share_the_budget() -> None:
    ratio = 0.25
    policy = DeCoPruneHS(keep_ratio=ratio, split=SPLIT)
    dynamic, static = policy.keep(policy.score(record()))
    assert not static.any()
    assert dynamic.sum(1).tolist() == [math.floor(ratio / SPLIT.share * TOKENS + 0.5)] * 2
    assert policy.first_heads(LAYERS, HEADS) == ((0,), (0, 1))
    assert SPLIT.share == 0.5


def test_the_split_calls_the_heads_with_most_mass_dynamic() -> None:
    mass = torch.tensor([[0.1, 0.5, 0.2], [0.4, 0.3, 0.05]])
    assert HeadSplit.from_mass(mass, 0.5).dynamic == ((False, True, False), (True, True, False))


def test_full_and_streaming_keep_all_and_nothing() -> None:
    scores = torch.zeros(2, TOKENS)
    assert Full().keep(scores) == (None,)
    (mask,) = Streaming().keep(scores)
    assert not mask.any()


def test_every_policy_is_named_once() -> None:
    assert set(POLICIES) == {
        "full", "streaming", "random", "temporal_difference", "reversed_discrepancy", "decoprune", "decoprune_hs"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Streaming(window=0), "smaller than a chunk"),
        (lambda: Streaming(sink=-1), "does not exist"),
        (lambda: DeCoPrune(), "either a threshold or a keep_ratio"),
        (lambda: DeCoPrune(threshold=0.1, keep_ratio=0.1), "not both"),
        (lambda: Random(keep_ratio=1.5), "no share"),
        (lambda: DeCoPrune(threshold=math.nan), "not a number"),
        (lambda: DeCoPruneHS(threshold=0.1), "needs a head split"),
        (lambda: DeCoPruneHS(keep_ratio=0.8, split=SPLIT), "more than the dynamic heads"),
        (lambda: DeCoPruneHS(threshold=0.1, split=SPLIT).first_heads(4, 3), "2 layers of"),
        (lambda: HeadSplit(((True, True),)), "dynamic and static"),
        (lambda: DeCoPrune(threshold=0.1).score(dataclasses.replace(record(), probe=None)), "probe step"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(make, reason: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PruneError, match=reason):
        make()
