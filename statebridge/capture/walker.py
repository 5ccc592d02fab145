"""The one walk over a transformers cache: read every layer's tensors, put them back.

A `DynamicCache` made from a config has one layer object per decoder layer; attention layers hold keys and
values, linear-attention layers a convolution history and a recurrent state by index, some layers hold both,
dummy layers nothing. This module knows those classes and their flags, and no model family.

R and C are updated in place by the forward pass, keys and values are replaced; every tensor is therefore
cloned on the way in and on the way out.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from statebridge.errors import CaptureError, UnsupportedModel
from statebridge.state import LayerSpec, LayerState

try:
    from transformers.cache_utils import DummyLayer
except ImportError:  # transformers before 5.20 gives stateless layers an empty recurrent slot instead

    class DummyLayer:  # type: ignore[no-redef]
        """Stands in for the class that this transformers does not have."""


_ATTENTION = (DynamicLayer, LinearAttentionAndFullAttentionLayer)
_RECURRENT = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


def new_cache(model: Any) -> DynamicCache:
    """An empty cache for `model`, with every layer in place."""
    cache = DynamicCache(config=model.config)
    check_cache(cache)
    return cache


def check_cache(cache: Any) -> None:
    """Refuse caches that cannot be captured exactly, by name and with the reason.

    Raises
    ------
    UnsupportedModel
        For static, quantised, sliding-window, foreign and model-specific caches.
    """
    name = f"{type(cache).__module__.split('.')[0]}.{type(cache).__name__}"
    if type(cache) is not DynamicCache:
        reasons = {
            "StaticCache": "its buffers are longer than what was read, and their filled part is not marked",
            "QuantizedCache": "it holds keys and values only in rounded form",
            "EncoderDecoderCache": "it belongs to an encoder-decoder model",
            "MiniMaxCache": "it keeps lightning-attention states outside the layers",
            "FLACache": "fla's own models lay out their state differently",
        }
        reason = reasons.get(type(cache).__name__, "its layout is not one this library reads")
        raise UnsupportedModel(f"A {name} cannot be captured: {reason}. Use a DynamicCache.")
    if cache.offloading:
        raise UnsupportedModel("An offloaded DynamicCache cannot be captured: it moves layers as it goes.")
    for index, layer in enumerate(cache.layers):
        kind = type(layer)
        if kind not in (*_ATTENTION, *_RECURRENT, DummyLayer, *DIFFERENTIABLE.values()):
            reason = (
                "it has dropped keys outside its window"
                if "Sliding" in kind.__name__
                else "its layout is not one this library reads"
            )
            raise UnsupportedModel(f"Layer {index} is a {kind.__name__}, which cannot be captured: {reason}.")
        if isinstance(layer, _RECURRENT):
            if layer.number_of_states != 1:
                raise UnsupportedModel(
                    f"Layer {index} keeps {layer.number_of_states} convolution states; one is supported."
                )
            if layer.record_past:
                raise CaptureError(
                    f"Layer {index} records its past for a later crop, which rolls back C but not R; "
                    "capture from a cache without activate_past_recording."
                )


def layer_parts(layer: Any) -> dict[str, torch.Tensor]:
    """The live tensors of one cache layer by field name; uninitialised parts are left out."""
    parts: dict[str, torch.Tensor] = {}
    if isinstance(layer, _ATTENTION) and layer.is_initialized and layer.get_seq_length() > 0:
        parts |= {"key": layer.keys, "value": layer.values}
    # a layer whose flag is off ignores the tensors in it, so they are no state
    if isinstance(layer, _RECURRENT) and layer.has_previous_state[0]:
        if layer.is_conv_states_initialized[0]:
            parts["conv_state"] = layer.conv_states[0]
        if layer.is_recurrent_states_initialized[0]:
            parts["recurrent_state"] = layer.recurrent_states[0]
    return parts


def read_cache(cache: Any, specs: tuple[LayerSpec, ...], *, borrow: bool = False) -> tuple[LayerState, ...]:
    """Clone every layer's tensors out of `cache`; with `borrow`, take the cache's own.

    Raises
    ------
    CaptureError
        When the cache has another number of layers or a layer lacks a part that the model keeps.
    UnsupportedModel
        When the cache is of a refused kind.
    """
    check_cache(cache)
    if len(cache.layers) != len(specs):
        raise CaptureError(
            f"The cache has {len(cache.layers)} layers, the model {len(specs)}; pass the cache of this model."
        )
    states = []
    for index, (layer, spec) in enumerate(zip(cache.layers, specs, strict=True)):
        parts = layer_parts(layer)
        absent = [name for name in ("key", "recurrent_state", "conv_state") if getattr(spec, name)]
        absent = [name for name in absent if name not in parts]
        if absent:
            raise CaptureError(
                f"Layer {index} of the cache has no {' and no '.join(absent)}: the cache is empty, was reset, "
                "or was filled only in part; run the model over the prefix first."
            )
        # out of inference mode, so that the clones can be written to and differentiated later
        with torch.inference_mode(False), torch.no_grad():
            parts = {field: tensor.detach() for field, tensor in parts.items()}
            states.append(LayerState(**(parts if borrow else {f: t.clone() for f, t in parts.items()})))
    return tuple(states)


def install_layer(
    cache: DynamicCache,
    index: int,
    state: LayerState,
    spec: LayerSpec,
    device: torch.device | None,
    dtypes: dict[str, torch.dtype],
    differentiable: bool,
    consume: bool = False,
) -> None:
    """Put one layer's tensors into a fresh cache, with every flag the layer reads.

    Parameters
    ----------
    cache
        A cache from `new_cache`.
    index
        The layer.
    state
        Tensors to install; parts that are None stay uninitialised, except that R without C, or C without R,
        begins at zero, which is what a model that has read nothing holds.
    spec
        What the model keeps in this layer.
    device, dtypes
        Where the model wants the layer's tensors and in which dtype it caches each field. R keeps its own
        dtype, because the first tensor a recurrent buffer is given pins it.
    differentiable
        Keep the tensors in the autograd graph instead of copying them out of it.
    consume
        Give the state's own tensors to the cache, which will change them.
    """
    if differentiable and type(cache.layers[index]) in DIFFERENTIABLE:
        cache.layers[index] = DIFFERENTIABLE[type(cache.layers[index])]()
    layer = cache.layers[index]
    held = state.recurrent_state if state.conv_state is None else state.conv_state
    if held is not None:
        # some kernels (Jamba's) cannot start with one of the two
        blank = {
            field: held.new_zeros((held.shape[0], *getattr(spec, field)), dtype=dtypes[field])
            for field in ("conv_state", "recurrent_state")
            if getattr(spec, field) and getattr(state, field) is None
        }
        state = dataclasses.replace(state, **blank)

    def placed(field: str, tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype if field == "recurrent_state" else dtypes.get(field, tensor.dtype)
        with torch.inference_mode(False):
            moved = (tensor if differentiable else tensor.detach()).to(device=device, dtype=dtype)
            # .to() returns the state's own tensor when nothing changes
            own = moved.data_ptr() == tensor.data_ptr() and not consume
            return moved.clone() if own or differentiable else moved

    if state.key is not None and state.value is not None:
        keys, values = placed("key", state.key), placed("value", state.value)
        # by hand, because lazy_initialization makes two empty tensors on the device first
        layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
        layer.keys, layer.values = keys, values
    if state.conv_state is not None:
        conv = placed("conv_state", state.conv_state)
        layer.dtype, layer.device = conv.dtype, conv.device
        layer.conv_states[0] = conv
        layer.conv_kernel_size[0] = conv.shape[-1]
        layer.is_conv_states_initialized[0] = layer.has_previous_state[0] = True
    if state.recurrent_state is not None:
        recurrent = placed("recurrent_state", state.recurrent_state)
        if isinstance(layer, _AssignRecurrent):
            layer.update_recurrent_state(recurrent)
        else:
            # by hand, because updating an empty layer would take the dtype from elsewhere and copy once more
            layer.recurrent_states[0] = recurrent
            layer.is_recurrent_states_initialized[0] = True
        layer.has_previous_state[0] = True


class _CopyAssigns(torch.Tensor):
    """An installed R that steps of one token may `copy_` into, as Mamba's do.

    The copy would overwrite what autograd saved of the step, so it assigns to the layer instead.
    """

    #: The layer, weakly: it holds this tensor, and a cycle would keep the graph of every training step alive until
    #: the garbage collector passes, which counts objects and not their bytes.
    layer: weakref.ref[_AssignRecurrent]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.copy_ and isinstance(args[0], cls) and (layer := args[0].layer()):
                return layer.update_recurrent_state(args[1])
            return func(*args, **(kwargs or {}))


class _AssignRecurrent:
    """Assign a new recurrent state instead of copying into the one that the forward pass used."""

    recurrent_states: dict[int, torch.Tensor]
    is_recurrent_states_initialized: dict[int, bool]

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        held = recurrent_states.as_subclass(_CopyAssigns)
        held.layer = weakref.ref(self)
        self.recurrent_states[state_idx] = held
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states


class DifferentiableRecurrentLayer(_AssignRecurrent, LinearAttentionLayer):  # type: ignore[misc]
    """A recurrent cache layer through which gradients pass."""


class DifferentiableHybridLayer(_AssignRecurrent, LinearAttentionAndFullAttentionLayer):  # type: ignore[misc]
    """A cache layer with attention and recurrent parts through which gradients pass."""


DIFFERENTIABLE: dict[type, type] = {
    LinearAttentionLayer: DifferentiableRecurrentLayer,
    LinearAttentionAndFullAttentionLayer: DifferentiableHybridLayer,
}
