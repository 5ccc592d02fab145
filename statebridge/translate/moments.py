"""Streaming first and second moments of paired rows, in float64, for many groups at once.

A group is whatever gets a map of its own: a KV head, a block of convolution channels. Batches are folded
in by the pairwise update of Chan, Golub and LeVeque (1983), so nothing is lost to cancellation when the
mean is large against the spread, and accumulators of different processes can be merged:

    S = S_a + S_b + (n_a n_b / n) (mean_b - mean_a)(mean_b - mean_a)^T

Of the receiver's rows only the per-channel spread is kept (the diagonal of S_yy): every squared error of
an affine map follows from it exactly, and the full matrix would be a third of the memory for nothing.
This module does not know what rows mean; memory depends on groups and dimensions, never on rows seen.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from statebridge.errors import FitError
from statebridge.translate.base import take

_ROWS = 8192  # rows converted to float64 at a time, so that a long batch does not double in memory


class Moments:
    """Mutable accumulator of paired moments over groups.

    Parameters
    ----------
    groups
        Number of groups G, or their names (used in error messages).
    dx, dy
        Width of a source row and of a receiver row.
    device
        Where the accumulators live; rows are moved there.

    Attributes
    ----------
    count : int
        Rows seen per group, N.
    mean_x, mean_y : Tensor [G, Dx], [G, Dy], float64
    sxx, sxy : Tensor [G, Dx, Dx], [G, Dx, Dy], float64
        Centred sums of products (not divided by N).
    syy : Tensor [G, Dy], float64
        Centred sums of squares of each receiver channel.

    References
    ----------
    Chan, Golub, LeVeque (1983), "Algorithms for computing the sample variance".
    """

    def __init__(
        self, groups: int | Sequence[str], dx: int, dy: int, device: torch.device | str = "cpu"
    ) -> None:
        self.names = tuple(f"group {g}" for g in range(groups)) if isinstance(groups, int) else tuple(groups)
        size = len(self.names)
        self.count = 0
        self.mean_x = torch.zeros(size, dx, dtype=torch.float64, device=device)
        self.mean_y = torch.zeros(size, dy, dtype=torch.float64, device=device)
        self.sxx = torch.zeros(size, dx, dx, dtype=torch.float64, device=device)
        self.sxy = torch.zeros(size, dx, dy, dtype=torch.float64, device=device)
        self.syy = torch.zeros(size, dy, dtype=torch.float64, device=device)

    @torch.no_grad()
    def update(self, x: Tensor, y: Tensor) -> Moments:
        """Fold in a batch of paired rows.

        Parameters
        ----------
        x, y
            Source rows `[G, N, Dx]` and receiver rows `[G, N, Dy]` of any floating dtype.

        Raises
        ------
        FitError
            If shapes do not fit, or a group holds NaN or infinity (named; nothing is folded in then).
        """
        groups, dx, dy = self.sxy.shape
        if x.ndim != 3 or y.ndim != 3 or x.shape[:2] != y.shape[:2]:
            raise FitError(
                f"Paired rows must be [G, N, D] with equal G and N, found {list(x.shape)} and {list(y.shape)}. "
                "Pass the same tokens of both models."
            )
        if (x.shape[0], x.shape[2], y.shape[2]) != (groups, dx, dy):
            raise FitError(
                f"Moments over (groups, Dx, Dy) = {(groups, dx, dy)} were given rows of "
                f"{(x.shape[0], x.shape[2], y.shape[2])}. Use one accumulator per geometry."
            )
        self._require_finite(x, "source")
        self._require_finite(y, "receiver")
        for start in range(0, x.shape[1], _ROWS):
            xs = x[:, start : start + _ROWS].to(self.sxx.device, torch.float64)  # [G, n, Dx]
            ys = y[:, start : start + _ROWS].to(self.sxx.device, torch.float64)  # [G, n, Dy]
            mean_x, mean_y = xs.mean(1), ys.mean(1)
            xs, ys = xs - mean_x[:, None], ys - mean_y[:, None]
            self._fold(xs.shape[1], mean_x, mean_y, xs.mT @ xs, xs.mT @ ys, ys.square().sum(1))
        return self

    def merge(self, other: Moments) -> Moments:
        """Fold in the moments of other rows, for example of another process; returns self."""
        if self.sxy.shape != other.sxy.shape:
            raise FitError(
                f"Moments of shape {list(self.sxy.shape)} and {list(other.sxy.shape)} cannot be merged. "
                "Merge only accumulators of the same layer and component."
            )
        device = self.sxx.device
        parts = (other.mean_x, other.mean_y, other.sxx, other.sxy, other.syy)
        self._fold(other.count, *(part.to(device) for part in parts))
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return the accumulators as named tensors (not copies), to be saved and resumed from."""
        return {
            "count": torch.tensor(self.count, dtype=torch.int64),
            "mean_x": self.mean_x,
            "mean_y": self.mean_y,
            "sxx": self.sxx,
            "sxy": self.sxy,
            "syy": self.syy,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], names: Sequence[str] | None = None) -> Moments:
        """Rebuild an accumulator that goes on where `state_dict` left off; its tensors are copied."""
        fields = ("count", "mean_x", "mean_y", "sxx", "sxy", "syy")
        count, *parts = take(state, fields, cls)
        groups, dx, dy = state["sxy"].shape
        moments = cls(groups if names is None else names, dx, dy, device=state["sxy"].device)
        moments.count = int(count)
        moments.mean_x, moments.mean_y, moments.sxx, moments.sxy, moments.syy = (p.clone() for p in parts)
        return moments

    def _fold(
        self, count: int, mean_x: Tensor, mean_y: Tensor, sxx: Tensor, sxy: Tensor, syy: Tensor
    ) -> None:
        total = self.count + count
        if total == 0:
            return
        step_x, step_y = mean_x - self.mean_x, mean_y - self.mean_y
        weight = self.count * count / total
        self.sxx += sxx + weight * step_x[:, :, None] * step_x[:, None, :]
        self.sxy += sxy + weight * step_x[:, :, None] * step_y[:, None, :]
        self.syy += syy + weight * step_y.square()
        self.mean_x += step_x * (count / total)
        self.mean_y += step_y * (count / total)
        self.count = total

    def _require_finite(self, rows: Tensor, side: str) -> None:
        bad = ~torch.isfinite(rows).flatten(1).all(1)  # [G]
        if bad.any():
            name = self.names[int(bad.nonzero()[0])]
            raise FitError(
                f"The {side} rows of {name} hold NaN or infinity. Leave out the document they come from, "
                "or capture it again in a wider dtype."
            )
