"""Models of the published shapes with random weights: everything about a full-size run except what weights decide.

Shapes, bytes, time and memory do not depend on the values of weights, so a machine without the checkpoints can
measure them.
The tiny pair is the same family at a size that a CPU runs in a second; it exists to try the scripts.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from statebridge.bridge import ModelPair
from statebridge.capture import shapes

FULL = ("Qwen/Qwen3.5-4B-Base", "Qwen/Qwen3.5-9B-Base")
TINY = ("tiny source", "tiny receiver")


def random_pair(tiny: bool, source_device: str, receiver_device: str, tokenizer: Any = None) -> ModelPair:
    """Source and receiver in bfloat16, each made on its device."""
    ends = zip(TINY if tiny else FULL, (source_device, receiver_device), strict=True)
    return ModelPair(*(random_model(name, device, i) for i, (name, device) in enumerate(ends)), tokenizer)


def random_model(name: str, device: str, seed: int) -> Any:
    """One model of the published shape `name`, or one of `TINY`, in bfloat16 and eval mode."""
    if name not in TINY:
        return shapes.random_model(name, "bfloat16", device, seed)
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(_tiny(64 + 16 * TINY.index(name)), dtype=torch.bfloat16)
    return shapes.remembering(model.eval().requires_grad_(False), seed)


def _tiny(hidden: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        max_position_embeddings=262144,
        initializer_range=hidden**-0.5,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    )
