"""The state of one layer: attention keys and values, convolution history, recurrent matrices.

Knows tensors and their axes, no models. Components are named as in the method: K (keys and values),
R (recurrent matrices), C (convolution history).

Axes: B batch, H heads, T tokens, D attention head dim, K and V delta key and value dims, C conv channels,
W conv width.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Component = Literal["K", "R", "C"]
COMPONENTS: tuple[Component, ...] = get_args(Component)

#: Field of `LayerState` -> component it belongs to.
FIELDS: dict[str, Component] = {"key": "K", "value": "K", "recurrent_state": "R", "conv_state": "C"}


@dataclass(frozen=True)
class LayerSpec:
    """Shapes of one layer's state for a single row and token; () where the layer lacks that part.

    Attributes
    ----------
    key, value
        (H, D) of the cached keys and of the cached values.
    recurrent_state
        Shape of the recurrent state without the batch axis, (H, K, V) for Gated DeltaNet.
    conv_state
        (C, W) of the convolution history.
    """

    key: tuple[int, ...] = ()
    value: tuple[int, ...] = ()
    recurrent_state: tuple[int, ...] = ()
    conv_state: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """ "attention", "recurrent", "hybrid" (both in one layer) or "empty"."""
        recurrent = bool(self.conv_state or self.recurrent_state)
        if self.key:
            return "hybrid" if recurrent else "attention"
        return "recurrent" if recurrent else "empty"

    @property
    def components(self) -> frozenset[Component]:
        """Components that this layer holds."""
        return frozenset(component for field, component in FIELDS.items() if getattr(self, field))


@dataclass(frozen=True)
class LayerState:
    """Tensors of one layer; None where the layer lacks that part or a partial state left it out.

    Attributes
    ----------
    key, value
        Cached keys [B, H, T, D], as cached, that is after rotation, and values [B, H, T, D].
    recurrent_state
        [B, H, K, V] for Gated DeltaNet, other families as their rule says; float32 where the model keeps
        it so.
    conv_state
        Un-activated packed projections [B, C, W], newest last.
    """

    key: torch.Tensor | None = None
    value: torch.Tensor | None = None
    recurrent_state: torch.Tensor | None = None
    conv_state: torch.Tensor | None = None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (field name, tensor) of every part that is present."""
        for field in FIELDS:
            tensor = getattr(self, field)
            if tensor is not None:
                yield field, tensor

    def map(self, function: Callable[[str, torch.Tensor], torch.Tensor]) -> LayerState:
        """A new layer state with `function(field, tensor)` in place of every tensor."""
        return dataclasses.replace(
            self, **{field: function(field, tensor) for field, tensor in self.tensors()}
        )

    def without(self, components: frozenset[Component]) -> LayerState:
        """A new layer state that lacks `components`."""
        return dataclasses.replace(self, **{f: None for f, c in FIELDS.items() if c in components})

    @property
    def spec(self) -> LayerSpec:
        """Shapes of the tensors that are present."""
        shapes: dict[str, tuple[int, ...]] = {}
        for field, tensor in self.tensors():
            shape = tuple(tensor.shape)
            shapes[field] = (shape[1], shape[3]) if FIELDS[field] == "K" else shape[1:]
        return LayerSpec(**shapes)
