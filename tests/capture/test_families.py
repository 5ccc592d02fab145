"""Every supported family, capture then restore: logits bit-equal to the model that never stopped."""

from __future__ import annotations

import pytest
import tiny
import torch
import transformers
from models import run

import statebridge

PREFIX = 70


@pytest.mark.parametrize("family", tiny.available())
@pytest.mark.parametrize("new", [1, 2, 63, 64, 65])
def test_restore_is_bit_exact(family: str, new: int) -> None:
    model = tiny.build(family)
    ids = tiny.ids(2, PREFIX + new, seed=3)
    _, cache = run(model, ids[:, :PREFIX])
    state = statebridge.capture(model, cache, input_ids=ids[:, :PREFIX])
    expected, _ = run(model, ids[:, PREFIX:], cache)  # the original goes on, and must not move the state
    got = statebridge.continue_from(model, state, ids[:, PREFIX:])
    assert torch.equal(got.logits, expected)  # bit-exact: same model, same schedule
    assert got.prefix_tokens_processed == 0
    assert got.new_tokens_processed == new


@pytest.mark.parametrize("family", tiny.available())
def test_continuation_equals_reading_it_all(family: str) -> None:
    """Prefix and next tokens in one pass give the same logits (tolerance: another schedule)."""
    model = tiny.build(family)
    ids = tiny.ids(2, PREFIX + 9, seed=8)
    whole, _ = run(model, ids)
    state = statebridge.prefill(model, ids[:, :PREFIX]).state()
    got = statebridge.continue_from(model, state, ids[:, PREFIX:])
    torch.testing.assert_close(got.logits, whole[:, PREFIX:], atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("family", tiny.available())
def test_every_component_matters(family: str) -> None:
    """The models here are such that a dropped component shows at the first positions."""
    model = tiny.build(family)
    ids = tiny.ids(1, PREFIX + 4, seed=4)
    state = statebridge.prefill(model, ids[:, :PREFIX]).state()
    whole = statebridge.continue_from(model, state, ids[:, PREFIX:]).logits
    for component in sorted(state.components):
        part = state.without(component)
        got = statebridge.continue_from(model, part, ids[:, PREFIX:], allow_partial=True)
        assert got.missing == {component}
        assert (got.logits - whole).abs().max() > 1e-2, component


@pytest.mark.parametrize("family", tiny.available())
def test_one_by_one_equals_the_live_cache(family: str) -> None:
    model = tiny.build(family)
    ids = tiny.ids(2, PREFIX + 6, seed=5)
    _, cache = run(model, ids[:, :PREFIX])
    live = statebridge.capture(model, cache, input_ids=ids[:, :PREFIX])
    for step in range(PREFIX, PREFIX + 6):
        expected, cache = run(model, ids[:, step : step + 1], cache)
        live = statebridge.continue_from(model, live, ids[:, step : step + 1])
        assert torch.equal(live.logits, expected)
    assert live.bookkeeping.schedule == (PREFIX, 1, 1, 1, 1, 1, 1)
    again = statebridge.continue_from(model, live.state(), ids[:, :1])
    assert torch.equal(again.logits, run(model, ids[:, :1], cache)[0])


@pytest.mark.parametrize("family", tiny.available())
def test_left_padding_keeps_rows_apart(family: str) -> None:
    """A row in a left-padded batch continues like the row alone (tolerance: other kernel shapes)."""
    model = tiny.build(family)
    ids = tiny.ids(2, PREFIX, seed=6)
    mask = torch.ones_like(ids)
    mask[0, :23] = 0
    ids[0, :23] = 0
    nxt = tiny.ids(2, 5, seed=7)
    batch = statebridge.prefill(model, ids, mask).state()
    assert batch.seen_tokens.tolist() == [PREFIX - 23, PREFIX]
    together = statebridge.continue_from(model, batch, nxt).logits
    alone = statebridge.prefill(model, ids[:1, 23:]).state()
    torch.testing.assert_close(
        together[:1], statebridge.continue_from(model, alone, nxt[:1]).logits, atol=2e-4, rtol=1e-3
    )
    rows = batch.split()
    assert rows[0].bookkeeping.length == PREFIX - 23
    assert rows[0].bookkeeping.token_digests == alone.bookkeeping.token_digests
    merged = statebridge.HybridState.merge(rows)
    assert torch.equal(statebridge.continue_from(model, merged, nxt).logits, together)


def test_every_named_family_is_here() -> None:
    from statebridge.capture import FAMILIES

    tested = {tiny.build(name).config.model_type for name in tiny.available()}
    absent = {"kimi_linear"} if not hasattr(transformers, "KimiLinearConfig") else set()
    assert set(FAMILIES) - absent <= tested
