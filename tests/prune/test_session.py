"""Sessions under policies: limits that must coincide, calls counted, state that must be saved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pruned_world import FRAMES, LAYERS, TOKENS, chunk, rollout, tiny_backbone

from statebridge.errors import PruneError, StateMismatch, StoreError
from statebridge.prune import (
    DeCoPrune,
    DeCoPruneHS,
    Full,
    HeadSplit,
    Policy,
    PrunedSession,
    Raggedness,
    Random,
    Reindex,
    ReversedDiscrepancy,
    Rotation,
    Streaming,
    TemporalDifference,
    measure_split,
    prune_chunk,
)
from statebridge.prune.adapters.small_world import SmallWorld
from statebridge.prune.attention import chosen_mass
from statebridge.sessions import SessionStore
from statebridge.worlds import HistoryCache, predict_at
from statebridge.worlds.cache import RotatedSlots

SPLIT = HeadSplit(((True, False, False), (True, True, False)))
HALF = 0.8  # near the median discrepancy of the tiny world, so that rows keep different numbers


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@contextmanager
def counted(backbone: SmallWorld) -> Iterator[list[int]]:
    calls: list[int] = []
    handle = backbone.model.register_forward_hook(lambda *_: calls.append(1))
    yield calls
    handle.remove()


def test_a_threshold_of_minus_infinity_is_full_kv_bit_for_bit() -> None:
    assert same(rollout(DeCoPrune(threshold=-math.inf, window=1))[1], rollout(Full())[1])


@pytest.mark.parametrize("reindex", [False, True])
def test_a_threshold_of_infinity_is_streaming_bit_for_bit(reindex: bool) -> None:
    g = Reindex(recent=1, span=4) if reindex else None
    ours, streaming = (
        rollout(policy, reindex=g)[1] for policy in (DeCoPrune(threshold=math.inf), Streaming())
    )
    assert same(ours, streaming)
    assert not same(streaming, rollout(Full(), reindex=g)[1])


def test_a_split_that_keeps_all_in_dynamic_heads_is_neither_full_nor_streaming() -> None:
    session, made = rollout(DeCoPruneHS(threshold=-math.inf, split=SPLIT, window=1))
    dynamic, static = session.cache.groups
    assert (dynamic.slots, static.slots) == (6 * TOKENS, 2 * TOKENS)
    assert [len(heads) for heads in dynamic.heads] == [1, 2]
    assert not same(made, rollout(Full())[1])
    assert not same(made, rollout(Streaming(window=1))[1])


@pytest.mark.parametrize(
    "policy",
    [
        Full(),
        Streaming(window=1),
        Random(window=1, keep_ratio=0.3),
        TemporalDifference(window=1, keep_ratio=0.3),
        ReversedDiscrepancy(window=1, keep_ratio=0.3),
        DeCoPrune(window=1, keep_ratio=0.3),
        DeCoPruneHS(window=1, keep_ratio=0.3, split=SPLIT),
    ],
    ids=lambda policy: policy.name,
)
def test_a_generated_chunk_costs_no_further_call(policy: Policy) -> None:
    backbone = tiny_backbone()
    session = PrunedSession(backbone, policy, batch=2)
    for number in range(4):
        with counted(backbone) as calls:
            session.generate(chunk(number)[1])
        assert len(calls) == len(backbone.schedule) + 1  # the steps and the clean pass
    with counted(backbone) as calls:
        session.observe(*chunk(4))
    assert len(calls) == (2 if policy.probes else 1)


def test_a_generated_chunk_is_scored_off_its_own_trajectory() -> None:
    session, _ = rollout(DeCoPrune(threshold=HALF), observed=2, generated=0)
    trajectory = session.generate(chunk(2)[1])
    patches = session.backbone.model.config.grid.patchify
    expected = (patches(trajectory.predictions[2]) - patches(trajectory.final)).square().mean(-1)
    assert torch.equal(session.pending[2], expected)


def test_an_observed_chunk_is_scored_at_its_own_time_against_the_kept_history() -> None:
    session, _ = rollout(DeCoPrune(threshold=HALF, window=1), observed=4, generated=0)
    before, (clean, condition) = session.cache, chunk(4)
    generator = session._generator(1)
    session.observe(clean, condition)
    model = session.backbone.model
    noise = torch.randn(clean.shape, generator=generator)
    history = before.read(model.config.rotary)
    guess = predict_at(model, clean, session.backbone.schedule[2], condition, history, noise)
    expected = (model.config.grid.patchify(guess) - model.config.grid.patchify(clean)).square().mean(-1)
    assert torch.equal(session.pending[4], expected)
    assert before.groups[0].slots < 4 * TOKENS  # the history before it was pruned indeed


def test_the_number_of_slots_is_not_taken_for_a_time() -> None:
    session, _ = rollout(Streaming(sink=0, window=1), observed=4, generated=0)
    slots = session.cache.groups[0].slots // TOKENS
    with pytest.raises(PruneError, match="clock is at 8"):
        session.generate(chunk(4, start=slots * FRAMES)[1])
    assert session.cache.groups[0].coordinates[..., 0].min() == 6.0


def one_row(cache: HistoryCache, row: int) -> HistoryCache:
    """The history of one row, without any padding."""
    (slots,) = cache.groups
    real = slots.chunks[row] >= 0
    alone = dataclasses.replace(
        slots,
        keys=tuple(x[row : row + 1, :, real] for x in slots.keys),
        values=tuple(x[row : row + 1, :, real] for x in slots.values),
        coordinates=slots.coordinates[row : row + 1, real],
        chunks=slots.chunks[row : row + 1, real],
        frames=slots.frames[row : row + 1, real],
        padded=False,
    )
    return dataclasses.replace(cache, groups=(alone,))


def test_rows_that_keep_different_numbers_do_not_see_padding() -> None:
    session, _ = rollout(DeCoPrune(threshold=HALF, window=1), observed=5, generated=0)
    (slots,) = session.cache.groups
    lengths = slots.valid.sum(1)
    assert slots.padded
    assert lengths[0] != lengths[1]
    backbone, (clean, condition) = session.backbone, chunk(5)
    level = torch.full((2,), 0.9)
    together = backbone.model(clean, level, condition, backbone.read(session.cache, None))[0]
    for row in range(2):
        mine = dataclasses.replace(
            condition,
            **{name: getattr(condition, name)[row : row + 1] for name in ("actions", "poses", "times")},
        )
        alone = backbone.read(one_row(session.cache, row), None)
        single = backbone.model(clean[row : row + 1], level[:1], mine, alone)[0]
        # float32, another order of sums in attention with a mask
        torch.testing.assert_close(together[row : row + 1], single, atol=2e-5, rtol=1e-4)


def test_a_gathered_history_equals_a_masked_one() -> None:
    session, _ = rollout(Full())
    mask = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(6)) > 0.5
    mask[:, 0] = True
    (slots,) = session.cache.groups
    hidden = (slots.chunks == 2).masked_scatter(slots.chunks == 2, ~mask)
    masked = dataclasses.replace(slots, chunks=slots.chunks.masked_fill(hidden, -1), padded=True)
    backbone, (clean, condition) = session.backbone, chunk(6)
    level = torch.full((2,), 0.9)
    answers = [
        backbone.model(clean, level, condition, backbone.read(cache, None))[0]
        for cache in (
            prune_chunk(session.cache, 2, [mask]),
            dataclasses.replace(session.cache, groups=(masked,)),
            session.cache,
        )
    ]
    # float32: the same terms in another order; what was dropped is far larger than that
    torch.testing.assert_close(answers[0], answers[1], atol=2e-5, rtol=1e-4)
    assert (answers[0] - answers[2]).abs().max() > 1e-3


def test_every_policy_meets_the_same_noise() -> None:
    backbone = tiny_backbone()
    first, second = (PrunedSession(backbone, p, batch=2) for p in (Full(), Random(window=1, keep_ratio=0.5)))
    # nothing has left the window yet, so both must make the same chunks
    for number in range(2):
        (a, b) = (session.generate(chunk(number)[1]).final for session in (first, second))
        assert torch.equal(a, b)


def test_every_chunk_and_every_use_has_noise_of_its_own() -> None:
    session, _ = rollout(Full(), observed=1, generated=0)
    drawn = [torch.randn(4, generator=session._generator(use)) for use in range(3)]
    session.observe(*chunk(1))
    drawn += [torch.randn(4, generator=session._generator(use)) for use in range(3)]
    drawn.append(torch.randn(4, generator=PrunedSession(tiny_backbone(), Full(), seed=4)._generator(0)))
    assert len({tuple(x.tolist()) for x in drawn}) == len(drawn)


@pytest.mark.parametrize(
    "policy",
    [
        DeCoPrune(threshold=HALF),
        TemporalDifference(keep_ratio=0.4),
        DeCoPruneHS(threshold=HALF, split=SPLIT),
        Random(keep_ratio=0.4),
    ],
    ids=lambda policy: policy.name,
)
def test_a_restored_session_continues_bit_for_bit(policy: Policy, tmp_path: Path) -> None:
    session, _ = rollout(policy, observed=3, generated=2)
    store = SessionStore(tmp_path / "store")
    identifier = store.checkpoint(session)
    again = PrunedSession(tiny_backbone(), policy, batch=2, seed=3)
    again.load(store.restore(identifier))
    for number in range(5, 9):
        (a, b) = (one.generate(chunk(number)[1]).final for one in (session, again))
        assert torch.equal(a, b)
    assert again.pruning_ratio() == session.pruning_ratio()
    assert not session.pending[8].isnan().any()


def test_scores_in_the_window_are_state() -> None:
    policy = DeCoPrune(threshold=HALF)
    session, _ = rollout(policy)
    assert sorted(session.pending) == [4, 5]
    names = {buffer.name for buffer in session.buffers()}
    assert {"pending.4", "pending.5", "last_frame"} <= names
    again = PrunedSession(tiny_backbone(), policy, batch=2, seed=3)
    again.load(session.buffers())
    again.pending.clear()
    for one in (session, again):
        one.generate(chunk(6)[1])
    assert session.cache.groups[0].slots < again.cache.groups[0].slots


def test_a_session_of_other_settings_or_parts_is_refused() -> None:
    session, _ = rollout(DeCoPrune(threshold=HALF))
    other = PrunedSession(tiny_backbone(), DeCoPrune(threshold=0.1), batch=2, seed=3)
    with pytest.raises(StateMismatch, match=r"threshold=0\.1"):
        other.load(session.buffers())
    for left_out in ("groups.0.layers.1.value", "pending.5", "last_frame"):
        with pytest.raises(StoreError, match="restore them whole"):
            session.load(b for b in session.buffers() if b.name != left_out)


def test_scores_that_are_no_numbers_are_refused_and_leave_the_session_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a comparison with them is false, so the threshold would drop every token without a word
    session, _ = rollout(DeCoPrune(threshold=HALF))
    before = session.clock, session.cache, sorted(session.pending), len(session.seen)
    frames, conditioning = chunk(6)
    frames[1, 0, 0, 0, 0] = math.nan
    with pytest.raises(PruneError, match="chunk 6 are no numbers in row 1"):
        session.observe(frames, conditioning)
    assert (session.clock, session.cache, sorted(session.pending), len(session.seen)) == before
    monkeypatch.setattr(DeCoPrune, "keep", lambda self, scores: (scores[:, 1:] > 0,))
    with pytest.raises(PruneError, match="The mask over chunk 4"):
        session.observe(*chunk(6))
    assert (session.clock, session.cache, sorted(session.pending), len(session.seen)) == before


@pytest.mark.parametrize(
    ("step", "reason"), [(4, "outside the schedule"), (-1, "outside"), (3, "every discrepancy is 0")]
)
def test_probe_steps_that_tell_nothing_are_refused(step: int, reason: str) -> None:
    with pytest.raises(PruneError, match=reason):
        PrunedSession(tiny_backbone(), DeCoPrune(threshold=0.1), probe_step=step)


def test_adapters_that_cannot_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone()
    monkeypatch.setattr(SmallWorld, "rotation", Rotation.UNKNOWN)
    with pytest.raises(PruneError, match="does not say whether"):
        PrunedSession(backbone, Full())
    monkeypatch.setattr(SmallWorld, "rotation", Rotation.RAW)
    monkeypatch.setattr(SmallWorld, "raggedness", Raggedness.NONE)
    with pytest.raises(PruneError, match="one mask"):
        PrunedSession(backbone, DeCoPruneHS(threshold=0.1, split=SPLIT))


def test_heads_are_split_by_the_mass_they_put_on_the_middle() -> None:
    session, _ = rollout(Full(sink=1, window=2))
    backbone, (clean, condition) = session.backbone, chunk(6)
    chunks = session.cache.groups[0].chunks
    middle, history = (chunks >= 1) & (chunks < 4), backbone.read(session.cache, None)
    mass = backbone.attention_mass(history, session.clock, clean, condition, middle)
    assert mass.shape == (LAYERS, 3)
    assert HeadSplit.from_mass(mass, 0.5) == measure_split(session, clean, condition, share=0.5)
    everywhere = backbone.attention_mass(history, session.clock, clean, condition, torch.ones_like(middle))
    assert bool((mass < everywhere).all())
    assert bool((everywhere < 1).all())  # the chunk itself takes the rest


def test_mass_is_a_share_of_the_softmax() -> None:
    draw = torch.Generator().manual_seed(0)
    query, own = (torch.randn(1, 2, 3, 4, generator=draw) for _ in range(2))
    keys = torch.randn(1, 2, 5, 4, generator=draw)
    chosen = torch.tensor([[True, False, False, True, False]])
    history = (RotatedSlots(((0, 1),), (keys,), (keys,), None),)
    weights = (query @ torch.cat([keys, own], 2).transpose(2, 3) / 2).softmax(-1)
    expected = (weights[..., 0] + weights[..., 3]).mean((0, 2))
    torch.testing.assert_close(chosen_mass(0, query, own, history, chosen), expected)


def test_a_split_is_not_measured_where_nothing_lies_in_the_middle() -> None:
    session, _ = rollout(Full(sink=2, window=4))
    with pytest.raises(PruneError, match="more than 6 chunks"):
        measure_split(session, *chunk(6), share=0.5)
