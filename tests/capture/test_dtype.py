"""Dtypes: R stays float32 from the model through the file into another dtype's model."""

from __future__ import annotations

import pytest
import tiny
import torch
import transformers
from models import run

import statebridge
from statebridge.capture.model import profile
from statebridge.errors import StateMismatch

PREFIX = 40
#: Families whose model keeps R in float32 whatever its own dtype is.
FLOAT_R = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "kimi_linear")


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """Families loaded from one folder in float32 and bfloat16, as users load them."""
    made = {}

    def load(family: str):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            tiny.build(family).save_pretrained(folder)
            made[family] = [
                transformers.AutoModelForCausalLM.from_pretrained(
                    folder, dtype=dtype, attn_implementation="sdpa"
                ).eval()
                for dtype in (torch.float32, torch.bfloat16)
            ]
        return made[family]

    return load


@pytest.mark.parametrize("family", tiny.available())
def test_a_bfloat16_model_restores_bit_exactly(halves, family: str, tmp_path) -> None:
    _, half = halves(family)
    ids = tiny.ids(2, PREFIX + 3, seed=51)
    _, cache = run(half, ids[:, :PREFIX])
    state = statebridge.capture(half, cache, input_ids=ids[:, :PREFIX])
    state.save(tmp_path / "s")
    expected, _ = run(half, ids[:, PREFIX:], cache)
    for again in (state, statebridge.HybridState.load(tmp_path / "s")):
        assert torch.equal(statebridge.continue_from(half, again, ids[:, PREFIX:]).logits, expected)


@pytest.mark.parametrize("family", [name for name in FLOAT_R if name in tiny.available()])
def test_recurrent_state_stays_float32_end_to_end(halves, family: str, tmp_path) -> None:
    full, half = halves(family)
    assert full.dtype == torch.float32
    assert half.dtype == torch.bfloat16
    ids = tiny.ids(1, PREFIX + 3, seed=51)
    for source in (full, half):
        state = statebridge.prefill(source, ids[:, :PREFIX]).state()
        state.to(dtype=torch.bfloat16).save(tmp_path / "s")
        state = statebridge.HybridState.load(tmp_path / "s")
        live = statebridge.continue_from(half, state, ids[:, PREFIX:])
        for layer in live.state().layers:
            if layer.recurrent_state is not None:
                assert layer.recurrent_state.dtype == torch.float32
            if layer.key is not None:
                assert layer.key.dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["qwen3_5", "falcon_h1", "lfm2", "llama"])
def test_a_float32_state_continues_in_the_bfloat16_cast(halves, family: str) -> None:
    """Nearer to the cast model's own continuation than bfloat16 rounding (tolerance: two dtypes)."""
    full, half = halves(family)
    assert profile(full).identity.differences(profile(half).identity) == {}
    ids = tiny.ids(1, PREFIX + 3, seed=51)
    state = statebridge.prefill(full, ids[:, :PREFIX]).state()
    own = statebridge.prefill(half, ids[:, :PREFIX]).state()
    got = statebridge.continue_from(half, state, ids[:, PREFIX:])
    expected = statebridge.continue_from(half, own, ids[:, PREFIX:])
    exact = statebridge.continue_from(full, state, ids[:, PREFIX:])
    assert got.logits.dtype == expected.logits.dtype == torch.bfloat16
    error, rounding = (got.logits - exact.logits).norm(), (expected.logits - exact.logits).norm()
    assert error < 1.2 * rounding
    back = statebridge.continue_from(full, own, ids[:, PREFIX:])
    assert (back.logits - exact.logits).norm() < 1.2 * rounding


def test_a_cast_that_rounds_the_rotary_frequencies_is_another_model() -> None:
    """`.to(bfloat16)` rounds them too, unlike loading with a dtype, and moves every position."""
    model = tiny.build.__wrapped__("qwen3_5")
    state = statebridge.prefill(model, tiny.ids(1, 9)).state()
    with pytest.raises(StateMismatch, match="rope inv_freq"):
        statebridge.restore(state, model.to(torch.bfloat16))


def test_a_planted_bfloat16_r_shows(halves) -> None:
    """The fault that this file is about: R cast to bfloat16 changes the first logits."""
    full, _ = halves("qwen3_5")
    ids = tiny.ids(1, PREFIX + 2, seed=51)
    state = statebridge.prefill(full, ids[:, :PREFIX]).state()
    cast = state.map(lambda field, t: t.bfloat16() if field == "recurrent_state" else t)
    whole = statebridge.continue_from(full, state, ids[:, PREFIX:]).logits
    assert (statebridge.continue_from(full, cast, ids[:, PREFIX:]).logits - whole).abs()[:, 0].max() > 1e-4
