"""What the walker must know of each model family beyond the layers of its cache.

The cache of transformers already says where keys, values, convolution history and recurrent state lie; a
rule adds the channel layout, the axes of the recurrent state and whether keys may be un-rotated and
translated. Add a family by adding a rule (docs/add_a_family.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from statebridge.errors import UnsupportedModel

Layout = tuple[tuple[str, int, int], ...]


def _no_layout(config: Any) -> Layout:
    return ()


def _no_layers(config: Any) -> frozenset[int]:
    return frozenset()


@dataclass(frozen=True)
class FamilyRule:
    """Rule of one model family.

    Attributes
    ----------
    recurrent_axes
        Axis letters of the recurrent state without the batch axis; "" without one.
    conv_layout
        Config -> (name, first channel, channels) of each block of the convolution history.
    stateless_layers
        Config -> layers that never hold a state, although an early cache gives them an empty slot.
    single_step
        Whether a forward pass of several tokens drops the recurrent state it was given, so that a
        continuation must feed one token at a time.
    gated_delta
        Whether R is a (gated) delta-rule matrix with Q | K | V convolution, which translators understand.
    """

    recurrent_axes: str = ""
    conv_layout: Callable[[Any], Layout] = _no_layout
    stateless_layers: Callable[[Any], frozenset[int]] = _no_layers
    single_step: bool = False
    gated_delta: bool = False


def _blocks(*sizes: tuple[str, int]) -> Layout:
    blocks, start = [], 0
    for name, size in sizes:
        blocks.append((name, start, size))
        start += size
    return tuple(blocks)


def _gdn_layout(config: Any) -> Layout:
    key = config.linear_num_key_heads * config.linear_key_head_dim
    value = config.linear_num_value_heads * config.linear_value_head_dim
    return _blocks(("Q", key), ("K", key), ("V", value))


def _kda_layout(config: Any) -> Layout:
    size = config.linear_num_heads * config.linear_head_dim
    return _blocks(("Q", size), ("K", size), ("V", size))


def _mamba2_layout(inner: Callable[[Any], int], groups: str, state: str) -> Callable[[Any], Layout]:
    def layout(config: Any) -> Layout:
        shared = getattr(config, groups) * getattr(config, state)
        return _blocks(("x", inner(config)), ("B", shared), ("C", shared))

    return layout


def _expanded(config: Any) -> int:
    return int(config.mamba_expand * config.hidden_size)


def _nemotron_stateless(config: Any) -> frozenset[int]:
    kinds = getattr(config, "layers_block_type", None) or config.layer_types
    return frozenset(i for i, kind in enumerate(kinds) if kind in ("moe", "mlp"))


_GDN = FamilyRule("HKV", _gdn_layout, gated_delta=True)
_MAMBA2 = FamilyRule("HPN", _mamba2_layout(_expanded, "mamba_n_groups", "mamba_d_state"))

FAMILIES: dict[str, FamilyRule] = {
    "qwen3_5_text": _GDN,
    "qwen3_5_moe_text": _GDN,
    "qwen3_next": _GDN,
    "olmo_hybrid": _GDN,
    "kimi_linear": FamilyRule("HKV", _kda_layout),
    "nemotron_h": FamilyRule(
        "HPN",
        _mamba2_layout(lambda c: int(c.mamba_num_heads * c.mamba_head_dim), "n_groups", "ssm_state_size"),
        stateless_layers=_nemotron_stateless,
    ),
    "granitemoehybrid": _MAMBA2,
    "falcon_h1": FamilyRule(
        "HPN",
        _mamba2_layout(lambda c: int(c.mamba_d_ssm or _expanded(c)), "mamba_n_groups", "mamba_d_state"),
    ),
    "zamba2": FamilyRule("HPN", _mamba2_layout(_expanded, "mamba_ngroups", "mamba_d_state")),
    "jamba": FamilyRule("PN", lambda c: _blocks(("x", _expanded(c))), single_step=True),
    "bamba": _MAMBA2,
    "lfm2": FamilyRule("", lambda c: _blocks(("Bx", c.hidden_size))),
}

REFUSED: dict[str, str] = {
    "minimax": "it keeps its lightning-attention state in a cache class of its own",
    "recurrent_gemma": "it keeps its recurrent state in the modules, outside any cache",
    "rwkv": "it passes its state as a plain list outside any cache",
    "mamba": "it keeps no attention cache and uses a cache class of its own",
    "mamba2": "it keeps no attention cache and uses a cache class of its own",
}


def rule_for(config: Any, recurrent: bool) -> FamilyRule:
    """The rule of a text config's family.

    Parameters
    ----------
    config
        A text config of transformers.
    recurrent
        Whether the model's cache holds recurrent layers; plain attention models need no rule.

    Raises
    ------
    UnsupportedModel
        For a refused family, or a recurrent one without a rule.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; only decoders have such a state.")
    if name in REFUSED:
        raise UnsupportedModel(
            f"{name} is not supported: {REFUSED[name]}. Use one of: {', '.join(sorted(FAMILIES))}."
        )
    if name in FAMILIES:
        return FAMILIES[name]
    if recurrent:
        raise UnsupportedModel(
            f"{name} has recurrent layers and no rule here; add one as docs/add_a_family.md shows."
        )
    return FamilyRule()
