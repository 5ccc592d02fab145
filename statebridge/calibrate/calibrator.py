"""All residuals of a state: one per layer and part, applied after the bridge's plan.

    calibrated = calibrator(state.layers)        # the same layers, bit for bit, before any training

Knows the geometry of the receiver's layers and tensors of its states; no models, no files, no training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from statebridge.calibrate.residual import ChannelAffine, LowRank, Residual, TwoSided
from statebridge.errors import ConfigError, StateFileError, StateMismatch
from statebridge.state import COMPONENTS, Component, LayerSpec, LayerState
from statebridge.state.layer import FIELDS

#: Which residual moves which field of a layer.
RESIDUALS: dict[str, type[Residual]] = {
    "key": LowRank,
    "value": LowRank,
    "recurrent_state": TwoSided,
    "conv_state": ChannelAffine,
}
Unit = tuple[int, str]
"""Layer and field that one residual serves."""


class Calibrator(nn.Module):
    """Residuals of some or all components of a receiver's state.

    Parameters
    ----------
    units
        (layer, field) -> residual. Whatever has none stays as it is.

    Examples
    --------
    >>> from statebridge.state import LayerSpec
    >>> layers = [LayerSpec(recurrent_state=(2, 8, 4), conv_state=(24, 4)), LayerSpec(key=(1, 8), value=(1, 8))]
    >>> Calibrator.identity(layers, rank=2).trainable_values
    104
    """

    def __init__(self, units: Mapping[Unit, Residual]) -> None:
        super().__init__()
        self._units = {unit: units[unit] for unit in sorted(units)}
        # registered under names that a state dict can hold
        self.residuals = nn.ModuleDict({f"{i}_{field}": r for (i, field), r in self._units.items()})

    @classmethod
    def identity(
        cls,
        layers: Sequence[LayerSpec],
        rank: int = 4,
        components: Collection[Component] = COMPONENTS,
        seed: int = 0,
    ) -> Calibrator:
        """A calibrator that moves nothing yet.

        Parameters
        ----------
        layers
            Geometry of the receiver's state.
        rank
            Rank R of the residuals of K and R.
        components
            Components that are calibrated.
        seed
            Of the fixed bases. A basis depends on the seed, its layer and its field alone, so that switching
            a component off changes no other.

        Raises
        ------
        ConfigError
            When a component is unknown, or the rank does not fit a dimension.
        """
        if unknown := set(components) - set(COMPONENTS):
            raise ConfigError(
                f"{sorted(unknown)[0]!r} is no component of a state; use {', '.join(COMPONENTS)}."
            )
        return cls(
            {
                (index, field): RESIDUALS[field].identity(shape, rank, _generator(seed, index, field))
                for index, layer in enumerate(layers)
                for field, component in FIELDS.items()
                if component in components and (shape := getattr(layer, field))
            }
        )

    def forward(self, layers: Sequence[LayerState]) -> tuple[LayerState, ...]:
        """Move every part that has a residual; parts without one, and missing parts, stay as they are."""
        return tuple(
            layer.map(lambda field, x, index=index: r(x) if (r := self._units.get((index, field))) else x)  # type: ignore[misc]
            for index, layer in enumerate(layers)
        )

    def movement(self, layers: Sequence[LayerState]) -> dict[Unit, tuple[Tensor, Tensor]]:
        """How far each part of the given (uncalibrated) layers is moved.

        Returns
        -------
        dict
            (layer, field) -> (‖x' - x‖², ‖x‖²), `[B]` each, before rounding to the dtype of the state.
        """
        found = {}
        for index, layer in enumerate(layers):
            for field, x in layer.tensors():
                if residual := self._units.get((index, field)):
                    found[index, field] = (residual.moved(x), _squared(x))
        return found

    def penalty(self, layers: Sequence[LayerState]) -> Tensor:
        """Identity penalty `[B]`: the mean over all parts of ‖x' - x‖² / ‖x‖²."""
        ratios = [moved / size for moved, size in self.movement(layers).values()]
        reference = next(x for layer in layers for _, x in layer.tensors())
        if not ratios:
            return torch.zeros(reference.shape[0], device=reference.device)
        return torch.stack([ratio.to(reference.device) for ratio in ratios]).mean(0)

    def without(self, *components: Component) -> Calibrator:
        """The same residuals less those of `components`; tensors are shared."""
        return Calibrator({unit: r for unit, r in self._units.items() if FIELDS[unit[1]] not in components})

    def require(self, layers: Sequence[LayerSpec]) -> Calibrator:
        """Return the calibrator if it fits a receiver of this geometry.

        Raises
        ------
        StateMismatch
            Names every residual that serves no part of the model, or one of another shape.
        """
        differences: dict[str, tuple[object, object]] = {}
        for (index, field), residual in self._units.items():
            shape = getattr(layers[index], field) if index < len(layers) else ()
            if not shape or not residual.fits(shape):
                sizes = {part: tuple(x.shape) for part, x in residual.tensors().items()}
                differences[f"layer {index} {field}"] = (shape or "nothing", sizes)
        if differences:
            raise StateMismatch(
                "this calibrator does not fit the receiver",
                differences,
                "Use the calibrator that was trained for this receiver.",
            )
        return self

    @property
    def components(self) -> tuple[Component, ...]:
        """Components that have residuals."""
        held = {FIELDS[field] for _, field in self._units}
        return tuple(component for component in COMPONENTS if component in held)

    @property
    def trainable_values(self) -> int:
        """Number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def values(self) -> int:
        """Number of all values, fixed bases included, each four bytes."""
        return self.trainable_values + sum(buffer.numel() for buffer in self.buffers())

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, named `layers.{layer}.{field}.{part}`."""
        return {
            f"layers.{index}.{field}.{part}": tensor
            for (index, field), residual in self._units.items()
            for part, tensor in residual.tensors().items()
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Calibrator:
        """Rebuild a calibrator from what `tensors` returned.

        Raises
        ------
        StateFileError
            When a name or a tensor is not one of a calibrator.
        """
        parts: dict[Unit, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            head, _, rest = name.partition(".")
            index, _, rest = rest.partition(".")
            field, _, part = rest.partition(".")
            if head != "layers" or not index.isdecimal() or field not in RESIDUALS:
                raise StateFileError(f"{name!r} is no tensor of a calibrator; train it again.")
            parts.setdefault((int(index), field), {})[part] = tensor
        return cls({unit: RESIDUALS[unit[1]].from_tensors(found) for unit, found in parts.items()})


def layer_norms(movement: Mapping[Unit, tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
    """Relative residual norm ‖x' - x‖ / ‖x‖ of each layer, all its parts together, `[B]`."""

    def total(layer: int, which: int) -> Tensor:
        return torch.stack([pair[which] for (index, _), pair in movement.items() if index == layer]).sum(0)

    return {layer: (total(layer, 0) / total(layer, 1)).sqrt() for layer in _layers(movement)}


def _layers(movement: Mapping[Unit, object]) -> Iterator[int]:
    return iter(dict.fromkeys(index for index, _ in movement))


def _squared(x: Tensor) -> Tensor:
    """‖x‖² of each row, `[B]`, kept away from 0 because it divides."""
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return wide.square().flatten(1).sum(1).clamp(min=torch.finfo(torch.float32).tiny)


def _generator(seed: int, layer: int, field: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{layer}:{field}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
