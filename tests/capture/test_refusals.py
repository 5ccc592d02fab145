"""What cannot be honoured is refused by name, with the reason, before anything runs."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
import transformers
from models import run
from transformers import cache_utils

import statebridge
from statebridge.capture import REFUSED, families
from statebridge.capture.model import identity_of
from statebridge.capture.walker import new_cache
from statebridge.errors import CaptureError, StateMismatch, UnsupportedModel

PREFIX = 20


def filled(family: str = "qwen3_5", batch: int = 2):
    model = tiny.build(family)
    ids = tiny.ids(batch, PREFIX, seed=71)
    _, cache = run(model, ids)
    return model, cache, ids


# --- models -------------------------------------------------------------------------------------------------


class Untouchable(torch.nn.Module):
    """A model of which only the config may be looked at."""

    def __init__(self, **config) -> None:
        super().__init__()
        self.config = transformers.PretrainedConfig(**config)
        self.config.model_type = config["model_type"]

    def forward(self, *args, **kwargs):
        raise AssertionError("the model ran")


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_refused_families_are_named_before_anything_runs(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{family} is not supported: ") as error:
        statebridge.prefill(Untouchable(model_type=family), tiny.ids(1, 3))
    assert REFUSED[family] in str(error.value)


@pytest.mark.parametrize(
    ("config", "model"),
    [
        ("MiniMaxConfig", "MiniMaxForCausalLM"),
        ("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM"),
        ("RwkvConfig", "RwkvForCausalLM"),
        ("MambaConfig", "MambaForCausalLM"),
        ("Mamba2Config", "Mamba2ForCausalLM"),
    ],
)
def test_refused_names_are_those_of_transformers(config: str, model: str) -> None:
    assert getattr(transformers, config).model_type in REFUSED
    assert hasattr(transformers, model)


def test_encoder_decoders_and_models_without_a_rule() -> None:
    with pytest.raises(UnsupportedModel, match="t5 is an encoder-decoder"):
        identity_of(Untouchable(model_type="t5", is_encoder_decoder=True))
    kept = families.FAMILIES.pop("falcon_h1")
    try:
        with pytest.raises(
            UnsupportedModel, match=r"falcon_h1 has recurrent layers and no rule.*add_a_family"
        ):
            identity_of(tiny.build.__wrapped__("falcon_h1"))
    finally:
        families.FAMILIES["falcon_h1"] = kept


def test_old_transformers_is_refused_by_version(monkeypatch) -> None:
    model, _, ids = filled()
    monkeypatch.setattr(transformers, "__version__", "5.15.2")
    with pytest.raises(UnsupportedModel, match=r"5\.15\.2 .*5\.16\.0 or newer"):
        statebridge.prefill(model, ids)


def test_weights_that_are_not_here() -> None:
    model = tiny.build.__wrapped__("qwen3_5")
    model.model.layers[1].to("meta")
    with pytest.raises(UnsupportedModel, match=r"layers\.1\..* is offloaded"):
        identity_of(model)


def test_sliding_windows_and_dynamic_rotary_scaling() -> None:
    model = tiny.build.__wrapped__("llama", max_position_embeddings=32, rope_parameters={
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0
    })  # fmt: skip
    with pytest.raises(UnsupportedModel, match="dynamic rotary scaling"):
        identity_of(model)
    config = transformers.MistralConfig(**(tiny._COMMON | {"num_hidden_layers": 1, "sliding_window": 8}))
    with pytest.raises(UnsupportedModel, match=r"Sliding.*outside its window"):
        identity_of(transformers.MistralForCausalLM(config))


# --- caches -------------------------------------------------------------------------------------------------


def foreign(name: str, base: type = cache_utils.DynamicCache) -> object:
    kind = type(name, (base,), {"__module__": "elsewhere.models", "__init__": lambda self: None})
    return kind()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("StaticCache", "longer than what was read"),
        ("QuantizedCache", "rounded form"),
        ("EncoderDecoderCache", "encoder-decoder"),
        ("MiniMaxCache", "lightning"),
        ("FLACache", "fla's own models"),
        ("SomethingElse", "not one this library reads"),
    ],
)
def test_foreign_caches_are_refused_by_name(name: str, reason: str) -> None:
    model, _, ids = filled()
    with pytest.raises(UnsupportedModel, match=rf"elsewhere\.{name} cannot be captured.*{reason}"):
        statebridge.capture(model, foreign(name), input_ids=ids)


def test_static_caches_of_transformers_are_refused() -> None:
    model, _, ids = filled("llama")
    with pytest.raises(UnsupportedModel, match=r"transformers\.StaticCache"):
        statebridge.capture(
            model, transformers.StaticCache(config=model.config, max_cache_len=64), input_ids=ids
        )


def test_layers_that_lose_or_hide_state_are_refused() -> None:
    model, cache, ids = filled()
    cache.offloading = True
    with pytest.raises(UnsupportedModel, match="offloaded"):
        statebridge.capture(model, cache, input_ids=ids)
    cache.offloading = False
    cache.layers[3] = cache_utils.DynamicSlidingWindowLayer(sliding_window=8)
    with pytest.raises(UnsupportedModel, match=r"Layer 3 is a DynamicSlidingWindowLayer.*window"):
        statebridge.capture(model, cache, input_ids=ids)
    _, cache, _ = filled()
    cache.layers[1].number_of_states = 2
    with pytest.raises(UnsupportedModel, match="Layer 1 keeps 2 convolution states"):
        statebridge.capture(model, cache, input_ids=ids)
    _, cache, _ = filled()
    cache.layers[0].record_past = True
    with pytest.raises(CaptureError, match=r"Layer 0 records its past.*C but not R"):
        statebridge.capture(model, cache, input_ids=ids)


def test_reset_caches_are_never_half_right() -> None:
    """After reset nothing is captured; after reset and reuse, the fresh state or a refusal."""
    for family in ("qwen3_5", "falcon_h1", "lfm2"):
        model, cache, ids = filled(family)
        cache.reset()
        with pytest.raises(CaptureError, match=r"cache is empty, was reset|not hold exactly"):
            statebridge.capture(model, cache, input_ids=ids)
        with torch.no_grad():
            other = tiny.ids(2, PREFIX, seed=72)
            run(model, other, cache)
        fresh = statebridge.prefill(model, other).state()
        try:
            state = statebridge.capture(model, cache, input_ids=other)
        except CaptureError:
            continue
        after = tiny.ids(2, 3, seed=73)
        assert torch.equal(
            statebridge.continue_from(model, state, after).logits,
            statebridge.continue_from(model, fresh, after).logits,
        )


def test_stale_flags_are_seen() -> None:
    """A layer whose flag is off ignores its tensors, silently; such a cache is no state."""
    for family, flag in [("qwen3_5", "has_previous_state"), ("qwen3_5", "is_recurrent_states_initialized"),
                         ("falcon_h1", "is_conv_states_initialized"), ("lfm2", "has_previous_state")]:  # fmt: skip
        model, cache, ids = filled(family)
        getattr(cache.layers[0], flag)[0] = False
        with pytest.raises(CaptureError, match="Layer 0 of the cache has no"):
            statebridge.capture(model, cache, input_ids=ids)
    model, _, ids = filled()
    with pytest.raises(CaptureError, match="cache is empty"):
        statebridge.capture(model, new_cache(model), input_ids=ids)


def test_caches_of_another_length_batch_or_model() -> None:
    model, cache, ids = filled()
    for wrong in (ids[:, :-1], torch.cat((ids, ids[:, :1]), dim=1), ids[:1]):
        with pytest.raises(CaptureError, match=r"not hold exactly.*pass sequences"):
            statebridge.capture(model, cache, input_ids=wrong)
    with pytest.raises(CaptureError, match="has 3 layers, the model 4"):
        statebridge.capture(model, filled("llama")[1], input_ids=ids)


# --- arguments ----------------------------------------------------------------------------------------------


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


# --- identities ---------------------------------------------------------------------------------------------


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
                "qwen3_5", rope_parameters=tiny._ROPE | {"mrope_section": [1, 2, 1]}
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
