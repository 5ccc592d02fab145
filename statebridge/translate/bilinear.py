"""Recurrent matrices: one bilinear map per head, fitted by alternating ridge from the identity.

    S_hat = mean_r + A (S_s - mean_s) B^T        A [K_r, K_s], B [V_r, V_s] per head

With B fixed, A is a ridge regression over all (state, value column) pairs, and the other way round. Only
the product of A and B is determined, so at the end both are scaled to equal root-mean-square singular
value, |A|_F / sqrt(min(K_r, K_s)) = |B|_F / sqrt(min(V_r, V_s)), trace A >= 0, which leaves the
identity as it is. Regularisation is relative (alpha = lambda trace(G) / D, G the gram matrix of the half
step), so the answer does not depend on that scaling. This module does not know layers, nor where states
are kept: it revisits them through a callable, block by block, so that they can be memory-mapped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from statebridge.translate.base import Translator, require_axes, take
from statebridge.translate.blocks import Blocks, PairedMeans, centred, passes
from statebridge.translate.ridge import check_grid, choose, relative_error


@dataclass(frozen=True, eq=False)
class HeadBilinear(Translator):
    """Bilinear map of the recurrent matrices of one layer.

    Parameters
    ----------
    left, right
        A `[H, K_r, K_s]` and B `[H, V_r, V_s]`, float32.
    mean_source, mean_receiver
        `[H, K_s, V_s]` and `[H, K_r, V_r]`, float32.
    """

    left: Tensor
    right: Tensor
    mean_source: Tensor
    mean_receiver: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Map `x` `[B, H, K_s, V_s]` to `[B, H, K_r, V_r]`, in float32, returned in the dtype of `x`.

        Raises
        ------
        StateMismatch
            If heads, K or V are not those the map was fitted for.
        """
        heads, keys, values = self.mean_source.shape
        require_axes("the recurrent map does not fit", x, {"B": None, "H": heads, "K": keys, "V": values})
        centred = x.float() - self.mean_source
        y = self.mean_receiver + self.left @ centred @ self.right.mT  # [B, H, K_r, V_r]
        return y.to(x.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Return `left`, `right`, `mean_source` and `mean_receiver`."""
        return {
            "left": self.left,
            "right": self.right,
            "mean_source": self.mean_source,
            "mean_receiver": self.mean_receiver,
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Rebuild the map from what `tensors` returned."""
        return cls(*take(tensors, ("left", "right", "mean_source", "mean_receiver"), cls))

    @classmethod
    def joined(cls, maps: Sequence[Self]) -> Self:
        """One map for the heads of all."""
        return cls(*(torch.cat(parts) for parts in zip(*(m.tensors().values() for m in maps), strict=True)))


class BilinearRidge:
    """Alternating ridge for the recurrent matrices of one layer, lambda chosen per head on validation states.

    Parameters
    ----------
    alphas
        The grid of lambdas, strictly positive and relative (see the module's head).
    n_iter
        Upper bound on sweeps; a sweep solves A, then B.
    tol
        Stop when a sweep moves no head's squared training error, relative to its spread, by more (for no
        grid value; regularised, the error itself may rise a little on the way).

    Attributes
    ----------
    map_ : HeadBilinear
        The fitted map, float32.
    choice_ : Tensor [H], int64
        Index of the chosen value in `alphas`.
    alpha_ : Tensor [H], float64
        The chosen (relative) value.
    path_error_ : Tensor [len(alphas), H], float64
        Relative validation error |S_hat - S_r| / |S_r - mean S_r| of every grid value.
    validation_error_ : Tensor [H], float64
        The same for the chosen value.
    copy_error_ : Tensor [H], float64, or None where the models' K or V differ
        The same for the plain copy S_hat = S_s.
    n_iter_ : int
        Sweeps done.

    Notes
    -----
    Each sweep reads the training blocks twice, for the whole grid at once; one pass more takes the means.
    A half step of A costs 2 K^2 V + K V^2 multiply-adds per state, head and grid value (float64), one of B
    2 K V^2 + K^2 V.
    Memory: a few times one block in float64, and gram matrices.
    """

    def __init__(
        self,
        alphas: Sequence[float] = (1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0),
        n_iter: int = 10,
        tol: float = 1e-5,
    ) -> None:
        self.alphas = alphas
        self.n_iter = n_iter
        self.tol = tol

    @torch.no_grad()
    def fit(self, train: Blocks, validation: Blocks) -> BilinearRidge:
        """Fit on the training blocks and choose lambda on the validation blocks.

        Parameters
        ----------
        train, validation
            Called for every pass; each call returns a fresh iterator over pairs of
            `[n, H, K_s, V_s]` and `[n, H, K_r, V_r]`, always the same states in the same order.

        Raises
        ------
        FitError
            If the grid holds values that are not positive, there are fewer than two states, a head holds
            NaN or infinity, or a later pass brings other states than the first.
        """
        check_grid(self.alphas, positive=True)
        means = PairedMeans.of(train, "training")
        left, right, self.n_iter_ = self._alternate(train, means)
        valid = PairedMeans.of(validation, "validation")
        squares, copy = _validation_squares(validation, valid.count, means, left, right)
        grid = torch.tensor(self.alphas, dtype=torch.float64, device=squares.device)[:, None]
        self.choice_ = choose(squares, grid.expand_as(squares), valid.spread)
        heads = torch.arange(len(self.choice_), device=squares.device)
        self.alpha_ = grid[self.choice_, 0]
        self.path_error_ = relative_error(squares, valid.spread)
        self.validation_error_ = self.path_error_[self.choice_, heads]
        self.copy_error_ = None if copy is None else relative_error(copy, valid.spread)
        chosen = (left[self.choice_, heads], right[self.choice_, heads], means.source, means.receiver)
        self.map_ = HeadBilinear(*(tensor.float() for tensor in chosen))
        return self

    def _alternate(self, train: Blocks, means: PairedMeans) -> tuple[Tensor, Tensor, int]:
        """Return A `[L, H, K_r, K_s]`, B `[L, H, V_r, V_s]` in float64 and the sweeps done."""
        heads, k_s, v_s = means.source.shape
        _, k_r, v_r = means.receiver.shape
        like, grid = means.source, len(self.alphas)
        left, right = (
            torch.eye(out, size, dtype=like.dtype, device=like.device).repeat(grid, heads, 1, 1)
            for out, size in ((k_r, k_s), (v_r, v_s))
        )
        before = like.new_full((grid, heads), torch.inf)
        sweeps = 0
        for _ in range(self.n_iter):
            left, _ = self._half_step(train, means, right, solve_left=True)
            right, squares = self._half_step(train, means, left, solve_left=False)
            sweeps += 1
            if ((before - squares).abs() <= self.tol * means.spread).all():
                break
            before = squares
        left, right = _normalised(left, right)
        return left, right, sweeps

    def _half_step(
        self, train: Blocks, means: PairedMeans, fixed: Tensor, solve_left: bool
    ) -> tuple[Tensor, Tensor]:
        """Solve one factor with the other fixed; also return the squared training error `[L, H]`.

        Solving A from B is solving B from A on transposed matrices, so only the latter is written out:
        rows F = A S (one per state and row of it), y ~ F B^T.
        """
        order, side = ((1, 3, 0, 2), 1) if solve_left else ((1, 2, 0, 3), 2)  # to [H, P, n, Q], Q solved
        q_s, q_r = means.source.shape[side], means.receiver.shape[side]
        gram = fixed.new_zeros(*fixed.shape[:2], q_s, q_s)  # [L, H, Q_s, Q_s]
        cross = fixed.new_zeros(*fixed.shape[:2], q_s, q_r)  # [L, H, Q_s, Q_r]
        for source, receiver in passes(train, means.count, "training"):
            x = centred(source, means.source).permute(order)  # [H, P_s, n, Q_s]
            y = centred(receiver, means.receiver).permute(order).flatten(1, 2)  # [H, P_r n, Q_r]
            flat = x.flatten(2)  # [H, P_s, n Q_s]
            for i, factor in enumerate(fixed):
                rows = (factor @ flat).unflatten(2, x.shape[2:]).flatten(1, 2)  # [H, P_r n, Q_s]
                gram[i] += rows.mT @ rows
                cross[i] += rows.mT @ y
        scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)  # trace / D, [L, H]
        weight = _solve(gram, cross, fixed.new_tensor(self.alphas)[:, None] * scale)  # [L, H, Q_s, Q_r]
        squares = means.spread + ((gram @ weight - 2 * cross) * weight).sum((2, 3))
        return weight.mT, squares


def _solve(gram: Tensor, cross: Tensor, alpha: Tensor) -> Tensor:
    """Return (gram + alpha I)^-1 cross for `[..., D, D]`, `[..., D, E]` and alpha `[...]` > 0.

    By Cholesky: a GPU has no batched eigendecomposition at these sizes, and the loop over matrices that stands in
    for it took nearly all of a fit.
    """
    size = gram.shape[-1]
    # where the source does not vary, cross is 0 and so is the answer; below rounding, alpha would not help the factor
    least = size * torch.finfo(gram.dtype).eps * gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    alpha = torch.where(alpha > 0, alpha.maximum(least), 1.0)
    shifted = gram + alpha[..., None, None] * torch.eye(size, dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky(shifted)
    half = torch.linalg.solve_triangular(factor, cross, upper=False)
    weight: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return weight


def _normalised(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Scale both factors to equal root-mean-square singular value, with trace A >= 0; A, B are `[L, H, ., .]`."""
    rms = [m.norm(dim=(-2, -1), keepdim=True) / min(m.shape[-2:]) ** 0.5 for m in (left, right)]
    ratio = torch.where((rms[0] > 0) & (rms[1] > 0), (rms[1] / rms[0]).sqrt(), 1.0)
    sign = torch.where(left.diagonal(dim1=-2, dim2=-1).sum(-1) < 0, -1.0, 1.0)[..., None, None]
    return left * ratio * sign, right / ratio * sign


def _validation_squares(
    blocks: Blocks, count: int, means: PairedMeans, left: Tensor, right: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the squared errors of every grid value `[L, H]` and of the copy `[H]` (None if shapes differ)."""
    squares = torch.zeros(left.shape[:2], dtype=torch.float64, device=left.device)
    copy = torch.zeros_like(squares[0]) if means.source.shape == means.receiver.shape else None
    for source, receiver in passes(blocks, count, "validation"):
        x, y = centred(source, means.source), centred(receiver, means.receiver)
        for i, (a, b) in enumerate(zip(left, right, strict=True)):
            squares[i] += (a @ x @ b.mT - y).square().sum((0, 2, 3))
        if copy is not None:
            copy += (source.to(torch.float64) - receiver.to(torch.float64)).square().sum((0, 2, 3))
    return squares, copy
