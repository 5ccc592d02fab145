"""What cannot be honoured is refused by name, with the reason, before anything runs."""

from __future__ import annotations

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
from statebridge.errors import CaptureError, UnsupportedModel

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
    # the module that the check looks at, whatever other tests have imported anew
    monkeypatch.setattr(identity_of.__globals__["transformers"], "__version__", "5.15.2")
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
