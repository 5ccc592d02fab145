"""What a bridge does to a state: every plan, rotation, padding, partial states, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import tiny
import tiny_pair
import torch
from tiny_pair import SMALL, ids_of, with_theta

import statebridge
from statebridge.bridge import PLANS, Bridge, FitConfig, ModelPair, fit_bridge, tokenizer_digest
from statebridge.errors import ConfigError, StateMismatch
from statebridge.state import HybridState, rotate


def tensors(state: HybridState) -> dict[str, torch.Tensor]:
    return {f"{i}.{name}": t for i, layer in enumerate(state.layers) for name, t in layer.tensors()}


def largest_difference(one: HybridState, other: HybridState) -> float:
    mine, theirs = tensors(one), tensors(other)
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def test_a_bridge_to_itself_is_the_identity() -> None:
    model = tiny_pair.pair().source
    same = ModelPair(model, model, tiny_pair.tokenizer())
    bridge = fit_bridge(same, tiny_pair.documents(30), FitConfig(**SMALL | {"fit_documents": 26}))
    ids = ids_of()
    state = statebridge.prefill(model, ids[:, :-3]).state()
    native = statebridge.continue_from(model, state, ids[:, -3:]).logits
    copied = statebridge.continue_from(model, bridge.with_plan("DDD")(state), ids[:, -3:]).logits
    assert torch.equal(copied, native)  # bit-exact: a copy
    translated = statebridge.continue_from(model, bridge.with_plan("TTT")(state), ids[:, -3:]).logits
    # the smallest regularisation, 1e-6 of the mean variance, shrinks the least varying directions a little
    assert (translated - native).abs().max() < 2e-3 * native.abs().max()


def test_keys_turn_to_another_theta() -> None:
    """Layers before the only attention layer know no positions, so the states of both models are comparable."""
    source = tiny_pair.pair().source
    receiver = with_theta(source, 500.0)
    pair = ModelPair(source, receiver, tiny_pair.tokenizer())
    ids = ids_of()
    state = statebridge.prefill(source, ids).state()
    own = statebridge.prefill(receiver, ids).state()
    assert (state.layers[3].key - own.layers[3].key).abs().max() > 0.1
    moved = Bridge.direct(pair.source_identity, pair.receiver_identity)(state)
    torch.testing.assert_close(moved.layers[3].key, own.layers[3].key, atol=2e-5, rtol=1e-4)  # two rotations
    for name in ("0.recurrent_state", "1.conv_state", "3.value"):
        assert torch.equal(tensors(moved)[name], tensors(own)[name])
    # translated: un-rotated keys of both are equal, so their map is the identity at every position
    bridge = fit_bridge(pair, tiny_pair.documents(30), FitConfig(**SMALL | {"fit_documents": 26}, plan="TDD"))
    assert bridge.config.fit["errors"]["3.key"]["translated"] < 1e-3
    torch.testing.assert_close(bridge(state).layers[3].key, own.layers[3].key, atol=5e-3, rtol=1e-2)


def test_a_fit_on_rotated_keys_would_be_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plant for the test above: without the un-rotation, no one map serves every position."""
    source = tiny_pair.pair().source
    pair = ModelPair(source, with_theta(source, 500.0), tiny_pair.tokenizer())
    monkeypatch.setattr("statebridge.bridge.paired.unrotate", lambda key, positions, rope: key)
    bridge = fit_bridge(pair, tiny_pair.documents(14), FitConfig(**SMALL))
    assert bridge.config.fit["errors"]["3.key"]["translated"] > 0.1


def test_only_one_of_the_models_rotates() -> None:
    identity = tiny_pair.pair().source_identity
    bare = dataclasses.replace(identity, rope=None)
    state = statebridge.prefill(tiny_pair.pair().source, ids_of()).state()
    unturned = dataclasses.replace(state, bookkeeping=dataclasses.replace(state.bookkeeping, model=bare))
    moved = Bridge.direct(bare, identity)(unturned)
    expected = rotate(state.layers[3].key, state.bookkeeping.positions, identity.rope)
    assert torch.equal(moved.layers[3].key, expected)
    back = Bridge.direct(identity, bare)(moved)
    torch.testing.assert_close(back.layers[3].key, state.layers[3].key, atol=1e-5, rtol=1e-5)  # two rotations


def test_rows_and_padding_stay_apart(fitted: Bridge) -> None:
    source, receiver = tiny_pair.pair().source, tiny_pair.pair().receiver
    ids = tiny.ids(2, 40, seed=3)
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    batch = fitted(statebridge.prefill(source, ids, mask).state())
    assert batch.seen_tokens.tolist() == [27, 40]
    alone = fitted(statebridge.prefill(source, ids[:1, 13:]).state())
    assert largest_difference(batch.select([0]), alone) < 5e-4  # tolerance: other kernel shapes in the source
    other = ids.clone()
    other[1] = tiny.ids(1, 40, seed=9)
    again = fitted(statebridge.prefill(source, other, mask).state())
    assert largest_difference(batch.select([0]), again.select([0])) == 0  # bit-exact: same shapes
    assert largest_difference(batch.select([1]), again.select([1])) > 0.1
    nxt = tiny.ids(2, 4, seed=5)
    together = statebridge.continue_from(receiver, batch, nxt).logits
    torch.testing.assert_close(
        together[:1], statebridge.continue_from(receiver, alone, nxt[:1]).logits, atol=5e-3, rtol=1e-2
    )


@pytest.mark.parametrize("plan", PLANS)
def test_source_and_receiver_states_share_nothing(fitted: Bridge, plan: str) -> None:
    state = statebridge.prefill(tiny_pair.pair().source, ids_of()).state()
    before = state.clone()
    with torch.inference_mode():
        moved = fitted.with_plan(plan)(state)
    book, new = state.bookkeeping, moved.bookkeeping
    owned = {
        t.untyped_storage().data_ptr() for t in (*tensors(state).values(), book.token_ids, book.pad_mask)
    }
    for tensor in (*tensors(moved).values(), new.token_ids, new.pad_mask, new.positions, new.next_position):
        assert tensor.untyped_storage().data_ptr() not in owned
        assert not tensor.is_inference()
        assert not tensor.requires_grad
        tensor.zero_()
    assert largest_difference(state, before) == 0
    assert torch.equal(book.token_ids, before.bookkeeping.token_ids)
    assert bool(book.pad_mask.all())
    assert new.model == fitted.config.receiver


def test_each_component_follows_its_letter(fitted: Bridge) -> None:
    state = statebridge.prefill(tiny_pair.pair().source, ids_of()).state()
    copied = tensors(fitted.with_plan("DDD")(state))
    for plan in PLANS:
        moved = tensors(fitted.with_plan(plan)(state))
        for letter, names in zip(
            plan, (("3.key", "3.value"), ("0.recurrent_state",), ("2.conv_state",)), strict=True
        ):
            for name in names:
                assert torch.equal(moved[name], copied[name]) == (letter == "D"), (plan, name)


def test_partial_states_stay_partial(fitted: Bridge) -> None:
    state = statebridge.prefill(tiny_pair.pair().source, ids_of()).state()
    whole = tensors(fitted(state))
    part = fitted(state.without("R", "C"))
    assert part.components == {"K"}
    assert part.missing == {"R", "C"}
    assert torch.equal(part.layers[3].key, whole["3.key"])
    nowhere = dataclasses.replace(state.bookkeeping, positions=None)
    with pytest.raises(StateMismatch, match="un-rotated"):
        fitted(dataclasses.replace(state, bookkeeping=nowhere))
    without_keys = dataclasses.replace(state.without("K"), bookkeeping=nowhere)
    assert fitted(without_keys).components == {"R", "C"}


def test_states_of_others_are_refused(fitted: Bridge) -> None:
    pair = tiny_pair.pair()
    foreign = statebridge.prefill(pair.receiver, ids_of()).state()
    with pytest.raises(StateMismatch, match="weights"):
        fitted(foreign)
    turned = statebridge.prefill(with_theta(pair.source, 77.0), ids_of()).state()
    with pytest.raises(StateMismatch, match="inv_freq"):
        fitted(turned)
    other = statebridge.prefill(pair.source, ids_of(), tokenizer="0" * 64).state()
    with pytest.raises(StateMismatch, match="another tokenizer"):
        fitted(other)
    known = statebridge.prefill(pair.source, ids_of(), tokenizer=tokenizer_digest(pair.tokenizer)).state()
    assert fitted(known).bookkeeping.tokenizer == fitted.config.tokenizer


def test_another_head_dim_is_translated_and_not_copied() -> None:
    source = tiny_pair.pair().source
    receiver = tiny.build("qwen3_5", seed=4, vocab_size=260, hidden_size=64, head_dim=24)
    pair = ModelPair(source, receiver, tiny_pair.tokenizer())
    bridge = fit_bridge(pair, tiny_pair.documents(14), FitConfig(**SMALL, plan="TDD"))
    assert bridge.config.fit["errors"]["3.key"]["copied"] is None
    reply = pair.handoff("Some text to be handed over", bridge=bridge, max_new_tokens=3)
    assert reply.prefix_tokens_processed == 0
    assert reply.new_ids.shape == (1, 3)
    with pytest.raises(StateMismatch, match=r"layer 3 key shape: expected \(2, 24\), found \(2, 16\)"):
        bridge.with_plan("DDD")


def test_plans_that_cannot_be_carried_out(fitted: Bridge) -> None:
    with pytest.raises(ConfigError, match="TXD"):
        fitted.with_plan("TXD")
    keyless = {key: t for key, t in fitted.translators.items() if key != (3, "value")}
    with pytest.raises(
        StateMismatch, match="translator of layer 3 value: expected 'fitted', found 'missing'"
    ):
        Bridge(fitted.config, keyless)
    swapped = fitted.translators | {(0, "recurrent_state"): fitted.translators[3, "key"]}
    with pytest.raises(StateMismatch, match="result of the translator of layer 0 recurrent_state"):
        Bridge(fitted.config, swapped)
    deeper = dataclasses.replace(fitted.config.receiver, layers=fitted.config.receiver.layers * 2)
    with pytest.raises(StateMismatch, match="number of layers: expected 8, found 4"):
        Bridge.direct(fitted.config.source, deeper)
