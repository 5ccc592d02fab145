"""The two models of the pair: building them, and growing the receiver out of the source.

Growth widens the residual stream from d to D and the MLP from m to M and keeps the function: old weights
are copied; everything that writes to the new residual dims starts at zero, so they carry 0; everything
that reads from them is small and random, so they learn at once. RMSNorm then divides by a root mean
square that is smaller by sqrt(d/D), hence

    1 + w' = sqrt(d/D) (1 + w)        (Qwen3.5 norms multiply by 1 + w)

New MLP units read at random and write zero. Per-head parts (q/k norms, gated norm, convolution, decay)
keep their shapes and values: keys, values and recurrent matrices of the two models mean the same thing.
Source of the idea: Net2Net (Chen et al. 2016, arXiv 1511.05641).
"""

from __future__ import annotations

from dataclasses import asdict

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from experiments.reference_pair.config import Shape

# Weights that write to the residual stream: new rows zero. The embedding is tied and reads as well, but
# its new columns must be zero all the same, or they would put something into the new dims.
WRITERS = ("down_proj.weight", "out_proj.weight", "o_proj.weight", "embed_tokens.weight", "lm_head.weight")
STREAM_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")


def build(shape: Shape, eos_token_id: int, pad_token_id: int) -> Qwen3_5ForCausalLM:
    """Build a model with fresh float32 weights (torch's global random state decides them)."""
    sizes = asdict(shape)
    theta = sizes.pop("rope_theta")
    frequencies = shape.head_dim // 8  # a quarter of the head is rotated, in pairs
    side = frequencies // 4
    config = Qwen3_5TextConfig(
        **sizes,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [frequencies - 2 * side, side, side],
        },
        eos_token_id=eos_token_id,
        bos_token_id=None,
        pad_token_id=pad_token_id,
    )
    model = Qwen3_5ForCausalLM(config).float()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight")):
                tensor.mul_((2 * shape.num_hidden_layers) ** -0.5)  # as GPT-2: the stream's variance stays
    return model


@torch.no_grad()
def grow(source: Qwen3_5ForCausalLM, shape: Shape) -> Qwen3_5ForCausalLM:
    """Return a wider model that computes what the source computes.

    Parameters
    ----------
    source
        The trained smaller model.
    shape
        The bigger shape; everything but hidden and intermediate size must equal the source's.

    Returns
    -------
    Qwen3_5ForCausalLM
        float32, in training mode. The logits agree with the source's up to rounding and the norms' eps.
    """
    receiver = build(shape, source.config.eos_token_id, source.config.pad_token_id)
    ratio = (source.config.hidden_size / shape.hidden_size) ** 0.5
    old = source.state_dict()
    for name, new in receiver.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied to the embedding
        was = old[name].to(new.dtype)
        if name.endswith(STREAM_NORMS):
            new.fill_(ratio * (1 + was.mean()) - 1)
            new[: len(was)] = ratio * (1 + was) - 1
            continue
        if name.endswith(WRITERS):
            new.zero_()
        new[tuple(slice(0, size) for size in was.shape)] = was
    return receiver
