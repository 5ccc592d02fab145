"""Faults of public reports, planted: each is refused or moves the logits at the first positions.

Kinds seen in vLLM, SGLang, llama.cpp, LMCache, mlx and transformers: a state that is another request's, K restored
and R left empty, R restored as the transpose or with permuted heads, C shifted by one or in another channel
order, a flag that stays off so that tensors are ignored, positions that restart, a mask over new tokens only,
one scalar length for ragged rows, and a snapshot that the running request goes on writing to.
"""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import tiny
import torch
from models import LAYOUTS, run

import statebridge
from statebridge.capture import continuation
from statebridge.errors import CaptureError, StateMismatch
from statebridge.state import HybridState

PREFIX = 33
# by name, because the function `capture` hides the module of that name
capture_module = importlib.import_module("statebridge.capture.capture")


def only(field: str, change):
    """A fault in one field of every layer that has it."""
    return lambda state: state.map(lambda name, t: change(t) if name == field else t)


def book(**changes):
    """A fault in the bookkeeping."""
    return lambda state: HybridState(
        state.layers,
        dataclasses.replace(state.bookkeeping, **{k: f(state.bookkeeping) for k, f in changes.items()}),
    )


FAULTS = {
    "keys of another row": only("key", lambda t: t.flip(0)),
    "values of another row": only("value", lambda t: t.flip(0)),
    "R of another row": only("recurrent_state", lambda t: t.flip(0)),
    "C of another row": only("conv_state", lambda t: t.flip(0)),
    "R left empty": only("recurrent_state", torch.zeros_like),
    "C left empty": only("conv_state", torch.zeros_like),
    "R heads permuted": only("recurrent_state", lambda t: t.roll(1, dims=1)),
    "R transposed in memory": only("recurrent_state", lambda t: t.mT.reshape(t.shape)),
    "C shifted by one token": only("conv_state", lambda t: t.roll(1, dims=-1)),
    "C newest first": only("conv_state", lambda t: t.flip(-1)),
    "C channels in another order": only("conv_state", lambda t: t.roll(t.shape[1] // 3, dims=1)),
    "key heads permuted": only("key", lambda t: t.roll(1, dims=1)),
    "key halves exchanged": only("key", lambda t: t.roll(t.shape[-1] // 2, dims=-1)),
    "keys shifted by one token": only("key", lambda t: t.roll(1, dims=2)),
}
RECURRENT = ("R", "C")


@pytest.mark.parametrize("family", LAYOUTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_in_tensors_move_the_first_logits(family: str, fault: str) -> None:
    """So a comparison there would find them; this proves that the models of these tests can tell."""
    model = tiny.build(family)
    ids, after = tiny.ids(2, PREFIX, seed=81), tiny.ids(2, 2, seed=82)
    state = statebridge.prefill(model, ids).state()
    if {"R": "R", "C": "C"}.get(fault[0], "K") not in state.components and fault[:2] in ("R ", "C "):
        pytest.skip("no such component")
    right = statebridge.continue_from(model, state, after).logits
    wrong = statebridge.continue_from(model, FAULTS[fault](state), after).logits
    assert (wrong[:, 0] - right[:, 0]).abs().max() > 1e-3


@pytest.mark.parametrize("fault", [
    book(next_position=lambda b: torch.zeros_like(b.next_position)),
    book(next_position=lambda b: b.next_position + 1),
    book(positions=lambda b: b.positions + 5),
    book(token_ids=lambda b: b.token_ids[:, 1:]),
    book(pad_mask=lambda b: b.pad_mask[:, -1:]),
])  # fmt: skip
def test_bookkeeping_that_disagrees_is_refused(fault) -> None:
    model = tiny.build("qwen3_5")
    state = statebridge.prefill(model, tiny.ids(2, PREFIX, seed=81)).state()
    with pytest.raises(StateMismatch, match="disagree"):
        statebridge.continue_from(model, fault(state), tiny.ids(2, 2, seed=82))


def padded():
    model = tiny.build("qwen3_5")
    ids = tiny.ids(2, PREFIX, seed=83)
    mask = torch.ones_like(ids)
    mask[0, :12] = 0
    return model, statebridge.prefill(model, ids, mask).state(), tiny.ids(2, 3, seed=84)


def test_planted_masks_and_positions_show(monkeypatch) -> None:
    """What continue_from builds itself is what makes ragged rows right: change it, and the rows change."""
    model, state, after = padded()
    right = statebridge.continue_from(model, state, after).logits
    real = continuation._forward

    def planted(change):
        def forward(model, live, ids, positions, *, last_only):
            return real(*change(model, live, ids, positions), last_only=last_only)

        monkeypatch.setattr(continuation, "_forward", forward)
        return statebridge.continue_from(model, state, after).logits

    def unmasked(model, live, ids, positions):
        full = torch.ones_like(live.bookkeeping.pad_mask)
        live.bookkeeping = dataclasses.replace(live.bookkeeping, pad_mask=full)
        return model, live, ids, positions

    faults = {
        "padding read as tokens": unmasked,
        "one scalar length for ragged rows": lambda m, c, i, p: (
            m,
            c,
            i,
            p.max(0, keepdim=True)[0].expand_as(p),
        ),
        "positions restart at 0": lambda m, c, i, p: (m, c, i, p - p[:, :1]),
    }
    for name, change in faults.items():
        assert (planted(change) - right)[0, 0].abs().max() > 1e-2, name
    # and the row without padding does not notice the first two
    assert torch.equal(planted(faults["one scalar length for ragged rows"])[1], right[1])


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2"])
def test_a_flag_that_stays_off_is_caught(monkeypatch, family: str) -> None:
    """Restore succeeds and is then ignored: the logits show it, and so does the next capture's source."""
    model = tiny.build(family)
    state = statebridge.prefill(model, tiny.ids(1, PREFIX, seed=85)).state()
    after = tiny.ids(1, 3, seed=86)
    right = statebridge.continue_from(model, state, after).logits
    real = capture_module.install_layer

    def forgetful(cache, index, *rest):
        real(cache, index, *rest)
        if hasattr(cache.layers[index], "has_previous_state"):
            cache.layers[index].has_previous_state[0] = False

    monkeypatch.setattr(capture_module, "install_layer", forgetful)
    cache = statebridge.restore(state, model)
    with pytest.raises(CaptureError, match="has no"):
        statebridge.capture(model, cache, input_ids=state.bookkeeping.token_ids)
    assert (statebridge.continue_from(model, state, after).logits - right)[:, 0].abs().max() > 1e-3


def test_a_snapshot_that_is_an_alias_moves() -> None:
    """Planted: a capture without clones. The running request goes on writing to R and C of the snapshot."""
    model = tiny.build("qwen3_5")
    ids, after = tiny.ids(1, PREFIX, seed=87), tiny.ids(1, 3, seed=88)
    live = statebridge.prefill(model, ids)
    state = live.state()
    alias = HybridState(
        tuple(
            dataclasses.replace(
                layer,
                **{
                    field: getattr(held, f"{field}s")[0]
                    for field, _ in layer.tensors()
                    if field in ("conv_state", "recurrent_state")
                },
            )
            for layer, held in zip(state.layers, live.cache.layers, strict=True)
        ),
        state.bookkeeping,
    )
    right = statebridge.continue_from(model, state, after).logits
    assert torch.equal(statebridge.continue_from(model, alias, after).logits, right)
    statebridge.continue_from(model, live, tiny.ids(1, 3, seed=89))
    assert torch.equal(statebridge.continue_from(model, state, after).logits, right)
    assert (statebridge.continue_from(model, alias, after).logits - right)[:, 0].abs().max() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in LAYOUTS if name != "jamba"])
def test_a_thousand_next_tokens(family: str) -> None:
    """In one call, bit-equal to the live model."""
    model = tiny.build(family)
    ids = tiny.ids(1, PREFIX + 1000, seed=91)
    _, cache = run(model, ids[:, :PREFIX])
    state = statebridge.capture(model, cache, input_ids=ids[:, :PREFIX])
    got = statebridge.continue_from(model, state, ids[:, PREFIX:])
    assert torch.equal(got.logits, run(model, ids[:, PREFIX:], cache)[0])
    assert (got.new_tokens_processed, got.prefix_tokens_processed) == (1000, 0)
    assert got.bookkeeping.seen_tokens.tolist() == [PREFIX + 1000]


@pytest.mark.slow
def test_a_thousand_tokens_one_by_one() -> None:
    """Like all of them in one call (tolerance: a thousand steps of another schedule)."""
    model = tiny.build("qwen3_5")
    ids = tiny.ids(1, PREFIX + 1000, seed=92)
    state = statebridge.prefill(model, ids[:, :PREFIX]).state()
    whole = statebridge.continue_from(model, state, ids[:, PREFIX:], last_logits_only=True)
    live = state
    for token in ids[:, PREFIX:].split(1, dim=1):  # about 8 s of one core
        live = statebridge.continue_from(model, live, token)
    torch.testing.assert_close(live.logits, whole.logits, atol=2e-3, rtol=1e-3)
    assert live.bookkeeping.length == PREFIX + 1000


def test_unrotated_keys_are_the_models_own() -> None:
    """The rotation of the state room is the model's: un-rotated keys are the projection's output."""
    from statebridge.state import rotate, unrotate

    for family in ("llama", "qwen3_5", "falcon_h1"):
        model = tiny.build(family)
        seen = []
        attention = next(m for m in model.modules() if hasattr(m, "k_proj"))
        tap = getattr(attention, "k_norm", attention.k_proj)
        handle = tap.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output))
        ids = tiny.ids(2, PREFIX, seed=93)
        mask = torch.ones_like(ids)
        mask[1, :7] = 0
        state = statebridge.prefill(model, ids, mask).state()
        handle.remove()
        layer = next(layer for layer in state.layers if layer.key is not None)
        raw = seen[-1].detach()
        if raw.ndim == 3:
            raw = raw.view(2, PREFIX, -1, layer.key.shape[-1]) * getattr(attention, "key_multiplier", 1.0)
        raw = raw.transpose(1, 2)
        rope, positions = state.bookkeeping.model.rope, state.bookkeeping.positions
        torch.testing.assert_close(unrotate(layer.key, positions, rope), raw, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(rotate(raw, positions, rope), layer.key, atol=1e-5, rtol=1e-4)
