"""Shapes of the published models: configs without weights, from a hub name or a folder.

The sizes of Qwen3.5's text models are written down here, so that a plan or a proof needs no network. What a state
of a model takes is measured, as everywhere: the model is built on the meta device, reads one token there, and its
cache shows every shape and dtype. No weight is held.

    bytes of a state of L tokens = L · bytes of one token's K and V + bytes of R and C
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from statebridge.capture.kernels import reference_kernels
from statebridge.capture.model import cache_keyword, cache_of
from statebridge.capture.walker import layer_parts, new_cache
from statebridge.errors import ConfigError, UnsupportedModel
from statebridge.state.layer import FIELDS

#: Name -> hidden, MLP, layers, query heads, KV heads, GDN value heads, tied embeddings.
_QWEN3_5: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "0.8B": (1024, 3584, 24, 8, 2, 16, True),
    "2B": (2048, 6144, 24, 8, 2, 16, True),
    "4B": (2560, 9216, 32, 16, 4, 32, True),
    "9B": (4096, 12288, 32, 16, 4, 32, False),
}


@dataclass(frozen=True)
class ModelSize:
    """What a model and its states take.

    Attributes
    ----------
    parameters
        Weights, tied ones once.
    weight_bytes
        Their bytes in the model's dtype.
    token_bytes
        Bytes of K and V per token.
    fixed_bytes
        Bytes of R and C.
    recurrent_values, recurrent_layers
        Numbers in all R matrices, and layers that have one.
    vocab
        Width of the logits.
    logit_bytes
        Bytes of one logit.
    """

    parameters: int
    weight_bytes: int
    token_bytes: int
    fixed_bytes: int
    recurrent_values: int
    recurrent_layers: int
    vocab: int
    logit_bytes: int

    def state_bytes(self, tokens: int) -> int:
        """Bytes of one document's state after `tokens` tokens."""
        return tokens * self.token_bytes + self.fixed_bytes


def shape_of(name: str, revision: str | None = None) -> Any:
    """Config of a causal language model: a folder's, that of a shipped shape, or the hub's.

    Raises
    ------
    UnsupportedModel
        When there is no such config.
    """
    size = name.rpartition("Qwen3.5-")[2].removesuffix("-Base")
    if not Path(name).exists() and size in _QWEN3_5:
        return _qwen3_5(*_QWEN3_5[size])
    try:
        config = transformers.AutoConfig.from_pretrained(name, revision=revision)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0]
        raise UnsupportedModel(f"The config of the model {name} cannot be read: {reason}") from error
    return config.get_text_config(decoder=True)


def size_of(name: str, dtype: str = "bfloat16", revision: str | None = None) -> ModelSize:
    """Measure a model's size on the meta device.

    Parameters
    ----------
    name, revision
        As for `shape_of`.
    dtype
        Of the weights; "auto" takes the one that the config names.
    """
    config = shape_of(name, revision)
    chosen = _dtype(config, dtype)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=chosen).eval()
    cache = new_cache(model)
    token = torch.zeros(1, 1, dtype=torch.int64, device="meta")
    # kernels cannot run where there are no values
    with torch.no_grad(), reference_kernels(model):
        output = model(
            input_ids=token, position_ids=token.clone(), use_cache=True, **{cache_keyword(model): cache}
        )
    sizes = {"K": 0, "R": 0, "C": 0}
    values = recurrent = 0
    for layer in cache_of(output).layers:
        parts = layer_parts(layer)
        recurrent += "recurrent_state" in parts
        for field, tensor in parts.items():
            sizes[FIELDS[field]] += tensor.numel() * tensor.element_size()
            values += tensor.numel() if FIELDS[field] == "R" else 0
    parameters = list(model.parameters())
    return ModelSize(
        parameters=sum(p.numel() for p in parameters),
        weight_bytes=sum(p.numel() * p.element_size() for p in parameters),
        token_bytes=sizes["K"],
        fixed_bytes=sizes["R"] + sizes["C"],
        recurrent_values=values,
        recurrent_layers=recurrent,
        vocab=int(output.logits.shape[-1]),
        logit_bytes=output.logits.element_size(),
    )


def random_model(name: str, dtype: str, device: str, seed: int, revision: str | None = None) -> Any:
    """A model of exactly the shape of `name` with random weights, built on `device`.

    The spread of the weights is 1/√(hidden width): each projection keeps the size of its input, so that what a
    state holds moves the logits, which the usual 0.02 of wide models may not.
    """
    config = shape_of(name, revision)
    config.initializer_range = config.hidden_size**-0.5
    torch.manual_seed(seed)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=_dtype(config, dtype))
    model.config._name_or_path = f"random weights in the shape of {name}"
    return remembering(model.eval().requires_grad_(False), seed)


def remembering(model: Any, seed: int) -> Any:
    """The same model with random decays near 1, wide convolutions and uneven norms, so that R and C matter."""
    generator = torch.Generator(model.device).manual_seed(seed)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if "A_log" in part:
                parameter.uniform_(-7.0, -2.0, generator=generator)
            elif "conv1d" in part:
                parameter.normal_(0.0, 0.5, generator=generator)
            elif parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator, device=model.device) * 0.1)
    return model


def _dtype(config: Any, dtype: str) -> torch.dtype:
    if dtype == "auto":
        return getattr(config, "dtype", None) or torch.float32
    chosen = getattr(torch, dtype, None)
    if not isinstance(chosen, torch.dtype):
        raise ConfigError(f"{dtype!r} is no dtype of torch; use float32, bfloat16 or float16.")
    return chosen


def _qwen3_5(
    hidden: int, mlp: int, layers: int, queries: int, kv: int, values: int, tied: bool
) -> transformers.Qwen3_5TextConfig:
    return transformers.Qwen3_5TextConfig(
        vocab_size=248_320,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=queries,
        num_key_value_heads=kv,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=values,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        full_attention_interval=4,
        max_position_embeddings=262_144,
        tie_word_embeddings=tied,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10_000_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    )
