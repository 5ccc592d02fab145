"""Which layers of a pair have which maps, and whether the two models correspond at all.

Maps go from layer i to layer i, and from head to head: the models need equally many layers of the same kinds
in the same order, equal numbers of KV heads, and equal convolution channels. Head dims of K, V and R may
differ. Knows model configs, no states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from statebridge.bridge.pair import ModelPair
from statebridge.capture import profile
from statebridge.capture.model import text_config
from statebridge.errors import FitError
from statebridge.translate import BlockLayout


@dataclass(frozen=True)
class Geometry:
    """Layers of the pair that have a map, with their sizes.

    Attributes
    ----------
    key_value
        Layer -> (H, D of source keys, D of receiver keys, D of source values, D of receiver values).
    recurrent
        Layer -> shapes (H, K, V) of source and receiver.
    conv
        Layer -> channel blocks, one per head.
    """

    key_value: dict[int, tuple[int, int, int, int, int]]
    recurrent: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    conv: dict[int, BlockLayout]

    @classmethod
    def of(cls, pair: ModelPair) -> Geometry:
        """Geometry of a pair of gated delta-rule hybrids, or of attention models.

        Raises
        ------
        FitError
            When the models' layers or heads do not correspond, or their family has no translators.
        """
        source, receiver = pair.source_identity.layers, pair.receiver_identity.layers
        kinds = [[spec.kind for spec in layers] for layers in (source, receiver)]
        if kinds[0] != kinds[1]:
            raise FitError(
                f"The models have {len(source)} and {len(receiver)} layers, or other kinds of layers in another "
                "order, and maps go from layer to layer; choose two models of one family and depth."
            )
        rules = [profile(model).rule for model in (pair.source, pair.receiver)]
        if not all(rule.gated_delta for rule in rules) and set(kinds[0]) != {"attention"}:
            raise FitError(
                "Only Gated DeltaNet hybrids and attention models can be fitted; R and C of other "
                "families can be captured and restored, not translated."
            )
        key_value, recurrent, conv = {}, {}, {}
        for index, (a, b) in enumerate(zip(source, receiver, strict=True)):
            if a.key:
                _require_equal(index, "KV heads", a.key[0], b.key[0])
                key_value[index] = (a.key[0], a.key[1], b.key[1], a.value[1], b.value[1])
            if a.recurrent_state:
                _require_equal(index, "recurrent heads", a.recurrent_state[0], b.recurrent_state[0])
                recurrent[index] = (a.recurrent_state, b.recurrent_state)
            if a.conv_state:
                ours, theirs = (_head_blocks(text_config(model)) for model in (pair.source, pair.receiver))
                _require_equal(index, "convolution heads (heads, dims)", ours, theirs)
                _require_equal(index, "convolution taps", a.conv_state[1], b.conv_state[1])
                conv[index] = BlockLayout.of_heads(*ours)
        return cls(key_value, recurrent, conv)

    def recurrent_bytes(self, states: int) -> int:
        """Bytes on disk of the R matrices, float32, of `states` states of both models."""
        return 4 * states * sum(math.prod(shape) for shapes in self.recurrent.values() for shape in shapes)


def _require_equal(index: int, what: str, ours: Any, theirs: Any) -> None:
    if ours != theirs:
        raise FitError(
            f"Layer {index} has {ours} {what} in the source and {theirs} in the receiver, and maps go from head "
            "to head; choose models in which they are equal."
        )


def _head_blocks(config: Any) -> tuple[tuple[int, int], ...]:
    """(heads, width) of the Q, K and V channels."""
    key = (config.linear_num_key_heads, config.linear_key_head_dim)
    return (key, key, (config.linear_num_value_heads, config.linear_value_head_dim))
