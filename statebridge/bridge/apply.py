"""Carry out a plan on the layers of a state: copy, or un-rotate, map and rotate; then the calibrator's residuals.

    moved = Moves(plan, translators, calibrator)(layers, before, after)

Small parts of equal shape are put together and moved at once: R and C of a layer are small whatever the prefix, and
32 layers one after the other keep a GPU waiting for Python. Keys and values of a long prefix are moved layer by
layer, because putting them together would copy them. `Moves.naive` moves every part by itself, and means the same.

Knows layers, maps and rotations; no identities, no bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from statebridge.calibrate import Calibrator, ChannelAffine, LowRank, Residual
from statebridge.select import Plan
from statebridge.state import LayerState, Rotation
from statebridge.state.layer import FIELDS
from statebridge.translate import HeadAffine, Translator, fused

Unit = tuple[int, str]
Parts = dict[Unit, Tensor]
#: Rotations of keys on the way in and on the way out, on a device.
Turn = Callable[[torch.device], tuple[Rotation | None, Rotation | None]]
_SMALL = 4 << 20  # bytes of a part up to which a copy costs less than the launches that it saves


class Moves:
    """What a bridge does to the parts of a state.

    Parameters
    ----------
    plan
        Which parts are translated.
    translators
        (layer, field) -> map.
    calibrator
        Residuals on top, or none.
    """

    def __init__(
        self, plan: Plan, translators: Mapping[Unit, Translator], calibrator: Calibrator | None
    ) -> None:
        self.plan, self.translators, self.calibrator = plan, translators, calibrator
        self._kinds: dict[Unit, Any] = {}
        self._maps: dict[tuple[Any, ...], Translator] = {}
        self._residuals: dict[tuple[Any, ...], Residual] = {}

    def __call__(self, layers: Sequence[LayerState], turns: Mapping[int, Turn]) -> tuple[LayerState, ...]:
        """Move all layers.

        Parameters
        ----------
        layers
            Layers of a source state.
        turns
            Layer -> rotations, for layers whose keys do not keep theirs.

        Returns
        -------
        tuple of LayerState
            Layers of a receiver state, in memory that no layer of the source shares.
        """
        parts = {(i, name): tensor for i, layer in enumerate(layers) for name, tensor in layer.tensors()}
        held = {} if self.calibrator is None else _units_of(self.calibrator)
        moved = dict(parts)
        for units in _groups(parts, self._kind):
            moved |= self._moved(units, parts, turns, held)
        for units in _groups(moved, lambda unit: type(held[unit]) if unit in held else None):
            if units[0] in held:
                moved |= self._calibrated(units, moved, held)
        return tuple(
            LayerState(**{name: moved[i, name] for name, _ in layer.tensors()})
            for i, layer in enumerate(layers)
        )

    def naive(self, layers: Sequence[LayerState], turns: Mapping[int, Turn]) -> tuple[LayerState, ...]:
        """The same, part by part and step by step."""
        out = []
        for index, layer in enumerate(layers):

            def move(name: str, x: Tensor, index: int = index) -> Tensor:
                before, after = _rotations(index, name, x, turns)
                y = x if before is None else before.apply(x)
                if self.plan.translates(index, FIELDS[name]):
                    y = self.translators[index, name].to(x.device).apply(y)
                y = y if after is None else after.apply(y)
                return y.clone() if y is x else y

            out.append(layer.map(move))
        return tuple(out) if self.calibrator is None else self.calibrator(out)

    def _kind(self, unit: Unit) -> Any:
        """What a part must have in common with others to be mapped together with them; None for a copy."""
        index, name = unit
        if not self.plan.translates(index, FIELDS[name]):
            return None
        if unit not in self._kinds:
            translator = self.translators[unit]
            shapes = tuple(tensor.shape for tensor in translator.tensors().values())
            self._kinds[unit] = type(translator), shapes
        return self._kinds[unit]

    def _moved(
        self, units: list[Unit], parts: Parts, turns: Mapping[int, Turn], held: Mapping[Unit, Residual]
    ) -> Parts:
        index, name = units[0]
        tensors = [parts[unit] for unit in units]
        x = tensors[0] if len(units) == 1 else torch.cat(tensors, dim=1)
        before, after = _rotations(index, name, x, turns)
        if self.plan.translates(index, FIELDS[name]):
            translator = self._map(units, x.device)
            if isinstance(translator, HeadAffine):
                y = translator.turned(x, before, after)
            else:
                y = translator.apply(x)
        else:
            y = x if before is None else before.apply(x)
            y = y if after is None else after.apply(y)
            if y is x and units[0] not in held:  # a residual makes a new tensor anyway
                y = x.clone()
        return _taken_apart(units, y)

    def _map(self, units: list[Unit], device: torch.device) -> Translator:
        key = (*units, device)
        if key not in self._maps:
            maps = [self.translators[unit] for unit in units]
            self._maps[key] = (maps[0] if len(maps) == 1 else type(maps[0]).joined(maps)).to(device)
        return self._maps[key]

    def _calibrated(self, units: list[Unit], parts: Parts, held: Mapping[Unit, Residual]) -> Parts:
        tensors = [parts[unit] for unit in units]
        residual = self._residual(units, tensors[0].device, held)
        if len(units) == 1:
            x = tensors[0]
            if (
                isinstance(residual, LowRank)
                and fused.available(x)
                and residual.basis.shape[-1] <= fused.RANK
            ):
                return {units[0]: fused.low_rank(x, residual.basis, residual.update)}
            return {units[0]: residual(x)}
        if isinstance(residual, ChannelAffine):
            return _taken_apart(units, residual(torch.cat(tensors, dim=1)))
        return dict(zip(units, residual(torch.stack(tensors)).unbind(), strict=True))

    def _residual(self, units: list[Unit], device: torch.device, held: Mapping[Unit, Residual]) -> Residual:
        """The residuals of equal parts as one, on their device; kept until a value of theirs changes."""
        versions = tuple((p.data_ptr(), p._version) for unit in units for p in held[unit].parameters())
        key = (*units, device, versions)
        if key not in self._residuals:
            for old in [k for k in self._residuals if k[:-1] == key[:-1]]:
                del self._residuals[old]
            self._residuals[key] = _as_one([held[unit] for unit in units]).to(device).requires_grad_(False)
        return self._residuals[key]


def _units_of(calibrator: Calibrator) -> dict[Unit, Residual]:
    named = ((name.partition("_"), residual) for name, residual in calibrator.residuals.items())
    return {(int(index), field): residual for (index, _, field), residual in named}  # type: ignore[misc]


def _groups(parts: Parts, kind: Callable[[Unit], Any]) -> Iterable[list[Unit]]:
    """Parts that can be moved at once: small ones of one field, shape, dtype, device and kind."""
    groups: dict[Any, list[Unit]] = {}
    for unit, x in parts.items():
        alike = kind(unit)
        together = alike is not None and x.numel() * x.element_size() <= _SMALL
        key = (unit[1], x.shape, x.dtype, x.device, alike) if together else unit
        groups.setdefault(key, []).append(unit)
    return groups.values()


def _taken_apart(units: list[Unit], y: Tensor) -> Parts:
    """Parts that lie behind each other on axis 1, as the units they belong to."""
    pieces = y.chunk(len(units), dim=1) if len(units) > 1 else (y,)
    return {unit: piece.contiguous() for unit, piece in zip(units, pieces, strict=True)}


def _rotations(
    index: int, name: str, x: Tensor, turns: Mapping[int, Turn]
) -> tuple[Rotation | None, Rotation | None]:
    return turns[index](x.device) if name == "key" and index in turns else (None, None)


def _as_one(residuals: Sequence[Residual]) -> Residual:
    """One residual for the parts of all: behind each other on axis 1 for channels, else stacked."""
    first = residuals[0]
    if len(residuals) == 1:
        return type(first).from_tensors(first.tensors())
    columns = zip(*(residual.tensors().values() for residual in residuals), strict=True)
    if isinstance(first, ChannelAffine):
        return ChannelAffine(*(torch.cat(column) for column in columns))
    # [layers, 1, 1, D, R], beside parts [layers, B, H, …, D]
    return type(first)(*(torch.stack(column)[:, None, None] for column in columns))
