"""Tiny random models of every family, built so that a fault in a state shows.

Key and value dims differ, heads are grouped, `initializer_range` is large and norms are perturbed: with
the default 0.02 a dropped state hardly moves the logits and every test would pass.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers

VOCAB = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GDN: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}

#: family -> (config class, model class, config fields)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _GDN | {"rope_parameters": _ROPE}),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        "Qwen3_5MoeForCausalLM",
        _GDN | _MOE | {"rope_parameters": _ROPE},
    ),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", _GDN | _MOE),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", _GDN),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "num_hidden_layers": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_key_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_experts_per_token": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "linear_attn_config": {
                "full_attn_layers": [4],
                "kda_layers": [1, 2, 3],
                "head_dim": 12,
                "num_heads": 4,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["mamba", "moe", "attention", "mamba"],
            "head_dim": 12,
            "mamba_num_heads": 4,
            "mamba_head_dim": 24,
            "ssm_state_size": 8,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        _MAMBA2
        | {
            "num_hidden_layers": 4,
            "layer_types": ["mamba", "mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            "position_embedding_type": "rope",
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        _MAMBA2 | {"num_hidden_layers": 3, "mamba_d_ssm": 96, "head_dim": 12},
    ),
    "zamba2": (
        "Zamba2Config",
        "Zamba2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_ngroups": 2,
            "n_mamba_heads": 4,
            "num_key_value_heads": 4,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "adapter_rank": 8,
            "use_mem_rope": True,
        },
    ),
    "jamba": (
        "JambaConfig",
        "JambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "bamba": (
        "BambaConfig",
        "BambaForCausalLM",
        _MAMBA2 | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    ),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_L_cache": 3,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"num_hidden_layers": 3}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"num_hidden_layers": 3, "head_dim": 16}),
}
RECURRENT_FAMILIES = tuple(name for name in FAMILIES if name not in ("llama", "qwen3"))


def perturb(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Make norms and biases asymmetric, so that swapped heads or axes cannot cancel."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "A_log" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            elif name.endswith("conv1d.weight"):
                # transformers leaves short convolutions near zero, which would hide the conv state
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


@functools.cache
def build(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A tiny random model of `family` in eval mode; the same call gives the same object."""
    config_name, model_name, fields = FAMILIES[family]
    config = getattr(transformers, config_name)(**(_COMMON | fields | overrides))
    config._attn_implementation = "sdpa"
    torch.manual_seed(seed)
    model = getattr(transformers, model_name)(config)
    return perturb(model, seed).eval()


def ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [B, T] that never use the special ids 0, 1 and 2."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def available() -> list[str]:
    """Families that the installed transformers has (5.16 has no kimi_linear)."""
    return [name for name, (config, _, _) in FAMILIES.items() if hasattr(transformers, config)]
