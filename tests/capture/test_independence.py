"""A state is a value: nothing done to a cache or model moves it, and two restores share no memory."""

from __future__ import annotations

import copy
import dataclasses
import gc

import pytest
import tiny
import torch
from models import LAYOUTS, run, snapshot, tensors_of, unmoved

import statebridge
from statebridge.capture import identity_of
from statebridge.capture.walker import layer_parts
from statebridge.errors import StateMismatch

PREFIX = 30


@pytest.fixture(params=LAYOUTS)
def family(request) -> str:
    return request.param


def captured(family: str):
    model = tiny.build(family)
    ids = tiny.ids(2, PREFIX + 5, seed=31)
    _, cache = run(model, ids[:, :PREFIX])
    return model, cache, statebridge.capture(model, cache, input_ids=ids[:, :PREFIX]), ids[:, PREFIX:]


def memory(*tensors: torch.Tensor) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def cached(cache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in layer_parts(layer).values()]


def test_capture_and_restores_share_no_memory(family: str) -> None:
    model, cache, state, _ = captured(family)
    one, two = statebridge.restore(state, model), statebridge.restore(state, model)
    places = [memory(*cached(cache)), memory(*tensors_of(state)), memory(*cached(one)), memory(*cached(two))]
    assert len(set.union(*places)) == sum(map(len, places))
    count = sum(len(list(layer.tensors())) for layer in state.layers)
    assert len(cached(one)) == len(cached(two)) == count


def test_nothing_done_to_a_cache_moves_the_state(family: str) -> None:
    model, cache, state, after = captured(family)
    before = snapshot(state)
    expected = statebridge.continue_from(model, state, after).logits
    run(model, after, cache)
    one, two = statebridge.restore(state, model), statebridge.restore(state, model)
    run(model, after.flip(1), one)
    statebridge.generate_from(model, state, after, max_new_tokens=4, do_sample=True)
    assert unmoved(state, before)
    # the other restore has not moved either, and neither has a fork of a live continuation
    assert torch.equal(run(model, after, two)[0], expected)
    live = statebridge.continue_from(model, state, after[:, :2])
    fork = live.state()
    kept = snapshot(fork)
    ahead = statebridge.continue_from(model, live, after[:, 2:]).logits
    assert unmoved(fork, kept)
    assert torch.equal(statebridge.continue_from(model, fork, after[:, 2:]).logits, ahead)
    for tensor in cached(one):
        tensor.fill_(torch.nan)
    del one, cache
    gc.collect()
    assert unmoved(state, before)
    assert torch.equal(statebridge.continue_from(model, state, after).logits, expected)


def test_nothing_done_to_the_callers_tensors_moves_the_state() -> None:
    model = tiny.build("qwen3_5")
    ids = tiny.ids(2, PREFIX)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    cache = statebridge.prefill(model, ids, mask).cache
    state = statebridge.capture(model, cache, input_ids=ids, attention_mask=mask, position_ids=positions)
    before = snapshot(state)
    for tensor in (ids, mask, positions):
        tensor.zero_()
    assert unmoved(state, before)
    assert state.bookkeeping.positions[0, -1] == PREFIX - 5


def test_training_on_a_restored_cache_does_not_move_the_state(family: str) -> None:
    model = tiny.build.__wrapped__(family)  # a model of its own, because it is trained
    ids = tiny.ids(2, PREFIX + 5, seed=31)
    state = statebridge.prefill(model, ids[:, :PREFIX]).state()
    before = snapshot(state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    live = statebridge.continue_from(model, state, ids[:, PREFIX:], differentiable=True)
    live.logits.logsumexp(-1).sum().backward()
    optimizer.step()
    assert unmoved(state, before)
    with pytest.raises(statebridge.errors.StateMismatch, match="weights: expected"):
        statebridge.continue_from(model, state, ids[:, PREFIX:])  # it is another model now


def test_captured_in_inference_mode_and_continued_outside() -> None:
    for family in tiny.available():
        model = tiny.build(family)
        ids = tiny.ids(2, PREFIX + 5, seed=31)
        with torch.inference_mode():
            live = statebridge.prefill(model, ids[:, :PREFIX])
            state = live.state()
            live = statebridge.continue_from(model, live, ids[:, PREFIX : PREFIX + 2])
            _, cache = run(model, ids[:, :PREFIX])
            foreign = statebridge.capture(model, cache, input_ids=ids[:, :PREFIX])
        assert not any(tensor.is_inference() for layer in state.layers for _, tensor in layer.tensors())
        for here in (state, foreign):
            first = statebridge.continue_from(model, here, ids[:, PREFIX : PREFIX + 2])
            second = statebridge.continue_from(model, first, ids[:, PREFIX + 2 :])
            assert not second.logits.requires_grad
        # a live continuation that began in inference mode goes on outside it
        assert torch.equal(statebridge.continue_from(model, live, ids[:, PREFIX + 2 :]).logits, second.logits)
        with torch.inference_mode():  # and the other way round
            inside = statebridge.continue_from(model, state, ids[:, PREFIX : PREFIX + 2])
        assert torch.equal(
            statebridge.continue_from(model, inside, ids[:, PREFIX + 2 :]).logits, second.logits
        )


def test_a_failed_restore_leaves_everything_as_it_was(family: str) -> None:
    """Nothing half-installed: the next continuation in the same process is right."""
    model, _, state, after = captured(family)
    before = snapshot(state)
    expected = statebridge.continue_from(model, state, after).logits
    broken = statebridge.HybridState(state.layers[:-1], state.bookkeeping)
    for _ in range(2):
        with pytest.raises(statebridge.errors.StateMismatch):
            statebridge.restore(broken, model)
    assert unmoved(state, before)
    assert torch.equal(statebridge.continue_from(model, state, after).logits, expected)


def test_measuring_a_model_leaves_it_as_it_was() -> None:
    model = tiny.build.__wrapped__("qwen3_5")
    model.train()
    model.model.layers[0].eval()
    model.gradient_checkpointing_enable()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    identity_of(model)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_row_never_reads_another(family: str) -> None:
    """Changing one row's prefix leaves the other row's logits, and swapping rows swaps them.

    Tolerance: experts compute their tokens in batches, whose sizes depend on the other row.
    """
    model = tiny.build(family)
    ids, after = tiny.ids(2, PREFIX, seed=41), tiny.ids(2, 4, seed=42)
    other = ids.clone()
    other[1] = tiny.ids(1, PREFIX, seed=43)
    one = statebridge.prefill(model, ids).state()
    two = statebridge.prefill(model, other).state()
    a, b = (statebridge.continue_from(model, state, after).logits for state in (one, two))
    torch.testing.assert_close(a[0], b[0], atol=1e-4, rtol=1e-4)
    assert (a[1] - b[1]).abs().max() > 1e-2
    swapped = statebridge.continue_from(model, one.select([1, 0]), after.flip(0)).logits
    torch.testing.assert_close(swapped.flip(0), a, atol=1e-4, rtol=1e-4)


def test_a_consumed_state_is_the_cache_and_refused_afterwards(family: str) -> None:
    """Bit-exact, and in no memory of its own: that is what it is for."""
    model, _, state, after = captured(family)
    expected = statebridge.continue_from(model, state, after).logits
    held = memory(*tensors_of(state))
    cache = statebridge.restore(state, model, consume=True)
    assert memory(*cached(cache)) < held  # less the bookkeeping
    assert torch.equal(run(model, after, cache)[0], expected)
    require_spent(state, model, after)


def test_a_borrowed_state_is_the_cache_until_it_goes_on(family: str) -> None:
    model, _, state, after = captured(family)
    live = statebridge.continue_from(model, state, after[:, :2])
    borrowed, own = live.state(borrow=True), live.state()
    assert memory(*cached(live.cache)) < memory(*tensors_of(borrowed))
    assert unmoved(borrowed, snapshot(own))
    kept = borrowed.clone()
    further = statebridge.continue_from(model, live, after[:, 2:3])
    require_spent(borrowed, model, after)
    assert unmoved(own, snapshot(kept))
    again = further.state(borrow=True)
    statebridge.continue_from(model, further, after[:, 3:4])
    require_spent(again, model, after)


def require_spent(state: statebridge.HybridState, model: object, after: torch.Tensor) -> None:
    """Nothing continues from a state whose memory a model has changed since."""
    uses = (
        state.validate,
        lambda: statebridge.restore(state, model, allow_partial=True),
        lambda: statebridge.continue_from(model, state, after),
        lambda: statebridge.generate_from(model, state, after, max_new_tokens=1),
        lambda: state.save("never.safetensors"),
    )
    for use in uses:
        with pytest.raises(StateMismatch, match="belongs to a cache that has gone on"):
            use()


def test_states_that_share_tensors_are_spent_together() -> None:
    """Whichever is consumed; copies, of whatever kind, stay."""
    model = tiny.build("qwen3_5")
    state = statebridge.prefill(model, tiny.ids(1, 9)).state()
    moved, part = state.to("cpu"), state.without("C")
    of_part = part.to(device="cpu")
    copies = [state.clone(), copy.deepcopy(part), state.select([0]), statebridge.HybridState.merge([moved])]
    wide = state.to(dtype=torch.float64)  # shares R only
    statebridge.restore(of_part, model, consume=True, allow_partial=True)
    for spent in (state, moved, part, of_part, wide):
        with pytest.raises(StateMismatch, match="belongs to a cache that has gone on"):
            spent.validate()
    for kept in copies:
        kept.validate()


def test_what_shares_with_a_borrowed_state_that_is_gone_is_spent_too() -> None:
    model = tiny.build("qwen3_5")
    live = statebridge.prefill(model, tiny.ids(1, 9))
    part = live.state(borrow=True).without("K").to("cpu")  # nobody holds the borrowed state itself
    part.validate()
    statebridge.continue_from(model, live, tiny.ids(1, 1))
    with pytest.raises(StateMismatch, match="belongs to a cache that has gone on"):
        part.validate()


def test_nothing_is_remembered_of_states_that_are_gone() -> None:
    state = statebridge.prefill(tiny.build("qwen3_5"), tiny.ids(1, 9)).state()
    for _ in range(50):
        state.without("K")
    assert len(state._sharing) <= 3


def test_positions_may_lie_below_zero() -> None:
    """Rotation knows differences only, so a prefix may be counted from anywhere."""
    model, ids = tiny.build("qwen3_5"), tiny.ids(1, 9)
    positions = torch.arange(9)[None] - 20
    output = model(input_ids=ids, position_ids=positions, use_cache=True)
    state = statebridge.capture(model, output.past_key_values, input_ids=ids, position_ids=positions)
    assert state.bookkeeping.next_position.tolist() == [-11]
    wrong = dataclasses.replace(state.bookkeeping, next_position=torch.tensor([0]))
    assert wrong.inconsistencies() == {"next_position": ([-11], [0])}
