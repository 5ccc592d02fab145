"""What does not fit is refused: padding, arguments, continuations changed elsewhere, states of other models."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
from models import run

import statebridge
from statebridge.capture import identity_of
from statebridge.errors import CaptureError, StateMismatch

PREFIX = 20


def filled(batch: int = 2):
    model = tiny.build("qwen3_5")
    ids = tiny.ids(batch, PREFIX, seed=71)
    _, cache = run(model, ids)
    return model, cache, ids


def test_padding_is_right_or_refused() -> None:
    model, cache, ids = filled()
    right = torch.ones_like(ids)
    right[1, -3:] = 0
    with pytest.raises(CaptureError, match=r"Rows \[1\] have padding after tokens"):
        statebridge.prefill(model, ids, right)
    with pytest.raises(CaptureError, match=r"Rows \[1\] have padding after tokens"):
        statebridge.capture(model, cache, input_ids=ids, attention_mask=right)
    left = right.flip(1)
    with pytest.raises(CaptureError, match=r"depend on who ran it: pass position_ids"):
        statebridge.capture(model, cache, input_ids=ids, attention_mask=left)
    with pytest.raises(CaptureError, match="no token at all"):
        statebridge.prefill(model, ids, left * torch.tensor([[1], [0]]))
    # a plain attention model has nothing that right padding could pollute
    plain = tiny.build("llama")
    after = tiny.ids(2, 3, seed=9)
    state = statebridge.prefill(plain, ids, right).state()
    alone = statebridge.prefill(plain, ids[1:, :-3]).state()
    assert state.bookkeeping.next_position.tolist() == [PREFIX, PREFIX - 3]
    torch.testing.assert_close(  # tolerance: another kernel shape
        statebridge.continue_from(plain, state, after).logits[1:],
        statebridge.continue_from(plain, alone, after[1:]).logits,
        atol=2e-4,
        rtol=1e-3,
    )


def test_arguments_that_do_not_fit() -> None:
    model, cache, ids = filled()
    state = statebridge.prefill(model, ids).state()
    for wrong in (ids[0], ids[:, :0], ids.float()):
        with pytest.raises(CaptureError, match="input_ids must be integers"):
            statebridge.prefill(model, wrong)
    with pytest.raises(CaptureError, match="differ in shape"):
        statebridge.prefill(model, ids, torch.ones(2, 3))
    with pytest.raises(CaptureError, match="schedule"):
        statebridge.capture(model, cache, input_ids=ids, schedule=(3, 4))
    for shape in ((2, 3), (5, 2, PREFIX), (3, PREFIX), (PREFIX,)):
        with pytest.raises(CaptureError, match="position_ids"):
            statebridge.capture(
                model, cache, input_ids=ids, position_ids=torch.zeros(shape, dtype=torch.int64)
            )
    for wrong in (ids[:1], ids[:, :0], ids[0]):
        with pytest.raises(CaptureError, match=r"must be \[2, N\]"):
            statebridge.continue_from(model, state, wrong)
    with pytest.raises(CaptureError, match="must be integers"):
        statebridge.continue_from(model, state, ids[:, :1].float())


def test_a_continuation_that_was_changed_elsewhere() -> None:
    model, _, ids = filled()
    live = statebridge.prefill(model, ids)
    run(model, ids[:, :2], live.cache)
    with pytest.raises(CaptureError, match="holds 22 tokens, its bookkeeping 20"):
        statebridge.continue_from(model, live, ids[:, :1])
    with pytest.raises(StateMismatch, match="key"):
        live.state()
    live = statebridge.prefill(model, ids)
    with pytest.raises(StateMismatch, match=r"another model.*weights: expected"):
        statebridge.continue_from(tiny.build("qwen3_5", seed=1), live, ids[:, :1])


def permuted_heads(model):
    """The same function per head, heads in another order: the state's heads no longer fit."""
    layer = model.model.layers[3].self_attn
    half = layer.k_proj.weight.shape[0] // 2
    with torch.no_grad():
        for projection in (layer.k_proj, layer.v_proj):
            projection.weight.copy_(projection.weight.roll(half, 0))
    return model


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: tiny.build("qwen3_5", seed=1), "weights"),
        (lambda: permuted_heads(tiny.build.__wrapped__("qwen3_5")), "weights"),
        (
            lambda: tiny.build.__wrapped__("qwen3_5", rope_parameters=tiny._ROPE | {"rope_theta": 10001.0}),
            "rope inv_freq",
        ),
        (
            lambda: tiny.build.__wrapped__(
                "qwen3_5", rope_parameters=tiny._ROPE | {"mrope_section": [3, 1, 0]}
            ),
            "rope axis",
        ),
        (lambda: tiny.build("qwen3_5", vocab_size=98), "vocab_size"),
        (lambda: tiny.build("qwen3_5", linear_value_head_dim=6), "layer 0 recurrent_state shape"),
        (lambda: tiny.build("qwen3_5", num_hidden_layers=8), "number of layers"),
        (lambda: tiny.build("qwen3_next"), "model_type"),
    ],
)
def test_states_of_other_models_are_refused(make, named: str) -> None:
    model, _, ids = filled()
    state = statebridge.prefill(model, ids).state()
    with pytest.raises(StateMismatch, match=f"{named}: expected .* found"):
        statebridge.restore(state, make())


def test_weights_changed_in_place_are_another_model() -> None:
    model = tiny.build.__wrapped__("qwen3_5")
    ids = tiny.ids(1, PREFIX)
    before = identity_of(model)
    assert identity_of(model) is before  # remembered
    assert identity_of(copy.deepcopy(model)) == before
    state = statebridge.prefill(model, ids).state()
    model(input_ids=ids).logits.logsumexp(-1).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    assert identity_of(model).differences(before).keys() == {"weights"}
    with pytest.raises(StateMismatch, match="weights"):
        statebridge.restore(state, model)
    rotary = tiny.build.__wrapped__("qwen3_5")
    assert identity_of(rotary) == before
    rotary.model.rotary_emb.inv_freq.mul_(1.1)
    assert identity_of(rotary).differences(before).keys() == {"rope inv_freq"}


def test_partial_states_need_consent_and_say_what_is_missing() -> None:
    model, _, ids = filled()
    state = statebridge.prefill(model, ids).state()
    for gone in ("K", "R", "C"):
        with pytest.raises(StateMismatch, match=rf"partial.*without {gone}.*allow_partial"):
            statebridge.restore(state.without(gone), model)
    one_layer = list(state.layers)
    one_layer[0] = one_layer[0].without(frozenset({"R"}))
    partial = statebridge.HybridState(tuple(one_layer), state.bookkeeping)
    with pytest.raises(StateMismatch, match="without R"):
        statebridge.restore(partial, model)
    live = statebridge.continue_from(model, partial, ids[:, :1], allow_partial=True)
    assert live.missing == {"R"}
    deep, after = tiny.build("qwen3_5", num_hidden_layers=8), tiny.ids(2, 1)
    state = statebridge.prefill(deep, ids).state()
    layers = list(state.layers)
    layers[3] = layers[3].without(frozenset({"K"}))
    with pytest.raises(StateMismatch, match=r"some attention layers only.*\[3\]"):
        statebridge.continue_from(
            deep, statebridge.HybridState(tuple(layers), state.bookkeeping), after, allow_partial=True
        )


def test_a_state_without_keys_continues_at_its_positions() -> None:
    """Also left-padded: what K is missing, no mask of the prefix may cover the new tokens."""
    model, _, ids = filled()
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    state = statebridge.prefill(model, ids, mask).state().without("K")
    after = tiny.ids(2, 3, seed=5)
    together = statebridge.continue_from(model, state, after, allow_partial=True).logits
    for b, row in enumerate(state.split()):
        alone = statebridge.continue_from(model, row, after[b : b + 1], allow_partial=True).logits
        torch.testing.assert_close(together[b : b + 1], alone, atol=2e-4, rtol=1e-3)  # other kernel shapes
