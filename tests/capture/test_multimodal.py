"""Qwen3.5 as it lies on the hub, with a vision part: rope deltas live on the model, not in the cache."""

from __future__ import annotations

import pytest
import tiny
import torch
from models import image_prompt, multimodal

import statebridge
from statebridge.capture.model import cache_keyword, cache_of, identity_of
from statebridge.errors import CaptureError


@pytest.fixture
def model():
    whole = multimodal()
    whole.model.rope_deltas = None
    return whole


def native(model, prompt: dict, after: torch.Tensor):
    """The model itself: reads the prompt, then goes on with its own cache and its own rope deltas."""
    with torch.no_grad():
        cache = cache_of(model(**prompt, use_cache=True))
        state = statebridge.capture(model, cache, input_ids=prompt["input_ids"])
        return state, model(input_ids=after, **{cache_keyword(model): cache}).logits


def test_text_part_and_text_model_are_one_identity(model) -> None:
    text = tiny.build("qwen3_5")
    assert identity_of(model).differences(identity_of(text)) == {}
    ids, after = tiny.ids(2, 30).clamp(max=80), tiny.ids(2, 4, seed=1).clamp(max=80)
    state = statebridge.prefill(model, ids).state()
    moved = statebridge.continue_from(text, state, after).logits
    # bit-exact: the same text layers run in the same way
    assert torch.equal(moved, statebridge.continue_from(model, state, after).logits)
    assert torch.equal(moved, native(model, {"input_ids": ids}, after)[1])


def test_an_image_prefix_keeps_its_position_delta(model) -> None:
    prompt, after = image_prompt(), tiny.ids(1, 5, seed=3).clamp(max=80)
    state, expected = native(model, prompt, after)
    delta = int(state.bookkeeping.rope_deltas)
    assert delta < 0  # the image takes fewer positions than tokens
    model.model.rope_deltas = None
    assert torch.equal(statebridge.continue_from(model, state, after).logits, expected)
    lost = state.bookkeeping.next_position - delta  # the planted fault: the delta is lost
    shifted = statebridge.HybridState(state.layers, _with(state.bookkeeping, next_position=lost))
    wrong = statebridge.continue_from(model, shifted, after).logits
    assert (wrong[:, :2] - expected[:, :2]).abs().max() > 1e-2


def _with(book, **changes):
    import dataclasses

    return dataclasses.replace(book, **changes)


def test_continuing_neither_reads_nor_writes_the_models_deltas(model) -> None:
    prompt, after = image_prompt(), tiny.ids(1, 5, seed=3).clamp(max=80)
    state, expected = native(model, prompt, after)
    # another session's prompt leaves its deltas on the model
    native(model, image_prompt(seed=5, grid=(8, 8)), after)
    foreign = model.model.rope_deltas.clone()
    assert int(foreign) != int(state.bookkeeping.rope_deltas)
    got = statebridge.continue_from(model, state, after)
    assert torch.equal(got.logits, expected)
    ids = statebridge.generate_from(model, state, after, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.model.rope_deltas, foreign)
    assert ids.prefix_tokens_processed == 0
    token, steps = got.logits[:, -1:].argmax(-1), []
    while len(steps) < ids.new_ids.shape[1]:
        steps.append(token)
        got = statebridge.continue_from(model, got, token)
        token = got.logits[:, -1:].argmax(-1)
    assert torch.equal(ids.new_ids, torch.cat(steps, dim=1))


def test_stale_deltas_are_not_believed(model) -> None:
    ids, after = tiny.ids(1, 30).clamp(max=80), tiny.ids(1, 4, seed=1).clamp(max=80)
    native(model, image_prompt(grid=(8, 8)), after)  # leaves deltas behind
    with torch.no_grad():
        cache = cache_of(model(input_ids=ids, use_cache=True))
    state = statebridge.capture(model, cache, input_ids=ids)
    assert state.bookkeeping.rope_deltas.tolist() == [0]
    prompt = image_prompt(grid=(2, 2))
    with torch.no_grad():
        cache = cache_of(model(**prompt, use_cache=True))
    small = model.model.rope_deltas
    for wrong in (small - 20, small + 5, small.repeat(2, 1), None):
        model.model.rope_deltas = wrong
        with pytest.raises(CaptureError, match="not of this prefix"):
            statebridge.capture(model, cache, input_ids=prompt["input_ids"])


def test_positions_of_an_image_prefix_can_be_said(model) -> None:
    prompt, after = image_prompt(), tiny.ids(1, 5, seed=3).clamp(max=80)
    positions, _ = model.model.get_rope_index(
        prompt["input_ids"], prompt["mm_token_type_ids"], image_grid_thw=prompt["image_grid_thw"]
    )
    _, expected = native(model, prompt, after)
    with torch.no_grad():
        cache = cache_of(model(**prompt, use_cache=True))
    model.model.rope_deltas = None
    state = statebridge.capture(model, cache, input_ids=prompt["input_ids"], position_ids=positions)
    assert torch.equal(statebridge.continue_from(model, state, after).logits, expected)
    both = statebridge.HybridState.merge([state, state]).select([1])
    assert torch.equal(both.bookkeeping.positions, positions)


def test_an_image_state_survives_its_file(model, tmp_path) -> None:
    prompt, after = image_prompt(), tiny.ids(1, 5, seed=3).clamp(max=80)
    state, expected = native(model, prompt, after)
    state.save(tmp_path / "s")
    loaded = statebridge.HybridState.load(tmp_path / "s")
    assert torch.equal(statebridge.continue_from(model, loaded, after).logits, expected)
