"""Models of the published shapes with random weights: everything about a full-size run except what weights decide.

Shapes, bytes, time and memory do not depend on the values of weights, so a machine without the checkpoints can
measure them. The values are chosen so that a state matters: decays near 1, wide convolutions, logits that move.
`tiny` is the same family at a size that a CPU runs in a second; it exists to test the scripts.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

_GDN: dict[str, Any] = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
}
_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
}
_FULL = _GDN | {"vocab_size": 248320, "num_hidden_layers": 32, "num_key_value_heads": 4}
_TINY = _GDN | {
    "vocab_size": 512,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_TINY_ROPE = _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}


def config(size: str) -> Qwen3_5TextConfig:
    """Config of "4b" or "9b", or of "tiny-source" or "tiny-receiver"."""
    sizes: dict[str, dict[str, Any]] = {
        "4b": _FULL
        | {"hidden_size": 2560, "intermediate_size": 9216, "num_attention_heads": 16}
        | {"tie_word_embeddings": True, "rope_parameters": dict(_ROPE)},
        "9b": _FULL
        | {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 16}
        | {"tie_word_embeddings": False, "rope_parameters": dict(_ROPE)},
        "tiny-source": _TINY
        | {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4}
        | {"tie_word_embeddings": True, "rope_parameters": dict(_TINY_ROPE)},
        "tiny-receiver": _TINY
        | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        | {"tie_word_embeddings": False, "rope_parameters": dict(_TINY_ROPE)},
    }
    made = Qwen3_5TextConfig(**sizes[size])
    made._attn_implementation = "sdpa"
    return made


def parameters(size: str) -> int:
    """Number of parameters, counted without memory for them."""
    with torch.device("meta"):
        return sum(p.numel() for p in Qwen3_5ForCausalLM(config(size)).parameters())


@torch.no_grad()
def random_model(size: str, device: str, dtype: torch.dtype, seed: int) -> Any:
    """A model in eval mode, made on `device` at once."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            model = Qwen3_5ForCausalLM(config(size))
    finally:
        torch.set_default_dtype(before)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "A_log" in name:
            parameter.uniform_(-7.0, -2.0, generator=generator)  # decays near 1, so that R remembers
        elif parameter.ndim == 1:
            # the gated norm multiplies by its weight, the others by one more than theirs
            parameter.normal_(float("linear_attn.norm" in name), 0.1, generator=generator)
        elif "conv1d" in name:
            parameter.normal_(0.0, 0.5, generator=generator)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    model.tie_weights()
    rotary = model.get_decoder().rotary_emb  # its frequencies are a buffer, which was left empty
    model.get_decoder().rotary_emb = type(rotary)(model.config).to(device)
    return model.eval()
