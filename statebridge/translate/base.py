"""What every fitted map of one state component has in common.

A translator is a small frozen value: tensors, and `apply`, which takes a component of the source's state
to the receiver's. It computes in float32 and gives keys, values and convolution history back in the dtype
they came in; recurrent matrices stay float32. It knows no model, no layer number and no rotation: keys
come in un-rotated, and the caller rotates them for the receiver afterwards.

`tensors` and `from_tensors` are the whole of its serialisation: plain named tensors, fit for safetensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from statebridge.errors import StateFileError, StateMismatch


class Translator(ABC):
    """A fitted map of one component of one layer, source to receiver."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Translate one component of a batch of states; the rows of the batch do not see each other."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything the map consists of, as named tensors."""

    @classmethod
    @abstractmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Rebuild the map from what `tensors` returned; raises StateFileError if a name is missing."""

    @classmethod
    @abstractmethod
    def joined(cls, maps: Sequence[Self]) -> Self:
        """One map for parts of several layers that lie behind each other on axis 1 (heads or channels).

        The maps must have tensors of equal shapes. What it makes of the joined parts is, head by head, what the
        maps make of each: many small products are one large one then.
        """

    def to(self, device: torch.device | str) -> Self:
        """Return the same map with its tensors on `device`."""
        return self.from_tensors({name: tensor.to(device) for name, tensor in self.tensors().items()})


def take(tensors: Mapping[str, Tensor], names: Iterable[str], owner: type) -> list[Tensor]:
    """Return the named tensors in order, or say which of them a file does not hold."""
    names = list(names)
    missing = [name for name in names if name not in tensors]
    if missing:
        raise StateFileError(
            f"The tensors of a {owner.__name__} lack {', '.join(map(repr, missing))} (found: "
            f"{', '.join(map(repr, tensors)) or 'none'}). Save the bridge again with this version of statebridge."
        )
    return [tensors[name] for name in names]


def require_axes(what: str, x: Tensor, expected: Mapping[str, int | None]) -> None:
    """Check the shape of `x` axis by axis; None leaves an axis free.

    Raises
    ------
    StateMismatch
        Names each axis that differs, with both sizes.
    """
    remedy = "Use the translator that was fitted for this pair of models."
    if x.ndim != len(expected):
        differences: dict[str, tuple[object, object]] = {"axes": (list(expected), list(x.shape))}
    else:
        differences = {
            axis: (size, found)
            for (axis, size), found in zip(expected.items(), x.shape, strict=True)
            if size is not None and size != found
        }
    if differences:
        raise StateMismatch(what, differences, remedy)
