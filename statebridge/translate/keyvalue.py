"""Keys and values: one affine map per KV head, shared by all positions.

    k_r ~ k_s W_h + b_h        for each head h, and the same for values with maps of their own

Keys are un-rotated when they come here, because one affine map cannot serve all positions of rotated
keys; the caller un-rotates before and rotates for the receiver after, or hands both rotations to `turned`. A
layer has two such maps, one per role. This module knows neither layers nor positions. Ridge: see ridge.py.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from statebridge.errors import FitError
from statebridge.state import Rotation
from statebridge.translate import fused
from statebridge.translate.base import Translator, require_axes, take
from statebridge.translate.moments import Moments
from statebridge.translate.ridge import DEFAULT_ALPHAS, AffineRidge


@dataclass(frozen=True, eq=False)
class HeadAffine(Translator):
    """Affine map of the keys or the values of one layer.

    Parameters
    ----------
    weight
        `[H, D_s, D_r]`, float32.
    bias
        `[H, D_r]`, float32.
    """

    weight: Tensor
    bias: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Map `x` `[B, H, T, D_s]` to `[B, H, T, D_r]`, in float32, returned in the dtype of `x`.

        Raises
        ------
        StateMismatch
            If the heads or their width are not those the map was fitted for.
        """
        heads, width, _ = self.weight.shape
        require_axes("the key/value map does not fit", x, {"B": None, "H": heads, "T": None, "D": width})
        y = torch.einsum("bhtd,hde->bhte", x.float(), self.weight)  # [B, H, T, D_r]
        return (y + self.bias[:, None]).to(x.dtype)

    def turned(self, x: Tensor, before: Rotation | None, after: Rotation | None) -> Tensor:
        """Map `x` `[B, H, T, D_s]`, rotated by `before` first and by `after` afterwards, where these are given.

        In one pass over memory where a GPU has the kernel for it (fused.py), else step by step.

        Raises
        ------
        StateMismatch
            If the heads or their width are not those the map was fitted for.
        """
        heads, width, out = self.weight.shape
        rotary = [r.cos.shape[-1] for r in (before, after) if r is not None]
        if x.shape[1] == heads and x.shape[-1] == width and fused.available(x, out, *rotary):
            return fused.turned_affine(x, self.halves, self.bias, before, after)
        return self.turned_naive(x, before, after)

    def turned_naive(self, x: Tensor, before: Rotation | None, after: Rotation | None) -> Tensor:
        """`turned`, step by step."""
        y = self.apply(x if before is None else before.apply(x))
        return y if after is None else after.apply(y)

    def tensors(self) -> dict[str, Tensor]:
        """Return `weight` and `bias`."""
        return {"weight": self.weight, "bias": self.bias}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Rebuild the map from `weight` and `bias`."""
        return cls(*take(tensors, ("weight", "bias"), cls))

    @classmethod
    def joined(cls, maps: Sequence[Self]) -> Self:
        """One map for the heads of all."""
        return cls(torch.cat([m.weight for m in maps]), torch.cat([m.bias for m in maps]))

    @functools.cached_property
    def halves(self) -> tuple[Tensor, Tensor]:
        """`weight` as a sum of two bfloat16 tensors, which together hold 16 of its 24 bits."""
        high = self.weight.bfloat16()
        return high, (self.weight - high.float()).bfloat16()


class KeyValueRidge(AffineRidge):
    """Affine ridge per head for the keys or the values of one layer.

    Parameters, attributes and errors are those of AffineRidge, a group being a head; in addition

    Attributes
    ----------
    map_ : HeadAffine
        The fitted map, float32.

    Examples
    --------
    >>> import torch
    >>> x = torch.randn(2, 3, 50, 4, generator=torch.Generator().manual_seed(0))
    >>> train = head_moments(3, 4, 4).update(head_rows(x), head_rows(2 * x + 1))
    >>> bool((KeyValueRidge().fit(train, train).map_.apply(x) - (2 * x + 1)).abs().max() < 1e-4)
    True
    """

    def __init__(self, alphas: Sequence[float] = DEFAULT_ALPHAS, relative: bool = True) -> None:
        super().__init__(alphas, relative)

    def fit(self, train: Moments, validation: Moments) -> KeyValueRidge:
        """Fit on moments of `head_rows` of both models; see AffineRidge.fit."""
        super().fit(train, validation)
        self.map_ = HeadAffine(self.weight_.float(), self.bias_.float())
        return self


def head_moments(heads: int, d_source: int, d_receiver: int, device: torch.device | str = "cpu") -> Moments:
    """Return an empty accumulator with one group per head."""
    return Moments([f"head {h}" for h in range(heads)], d_source, d_receiver, device)


def head_rows(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Turn keys or values into one row per token, for `Moments.update`.

    Parameters
    ----------
    x
        `[B, H, T, D]`.
    mask
        `[B, T]`, True where a token is real; padded tokens give no row.

    Returns
    -------
    Tensor
        `[H, N, D]` in the dtype of `x`, N = B T without a mask.
    """
    if x.ndim != 4 or (mask is not None and mask.shape != (x.shape[0], x.shape[2])):
        shape = None if mask is None else list(mask.shape)
        raise FitError(
            f"Keys and values must be [B, H, T, D] with a mask [B, T], found {list(x.shape)} and {shape}. "
            "Pass the tensors of one layer."
        )
    rows = x.transpose(0, 1)  # [H, B, T, D]
    return rows.flatten(1, 2) if mask is None else rows[:, mask.bool()]
