"""Affine ridge regression from moments, for many groups at once, with the regularisation chosen by validation.

    W = (S_xx + alpha I)^-1 S_xy        b = mean_y - mean_x W        y ~ x W + b

S_xx is diagonalised once and serves the whole grid. The validation error of each alpha follows exactly
from the validation rows' own moments, so no row is visited twice:

    |Y - XW - b|^2 = tr S_yy - 2 tr W^T S_xy + tr W^T S_xx W + N |mean_y - mean_x W - b|^2

This module does not know what a group is, nor where the rows come from. alpha means what it means in
scikit-learn's `Ridge(alpha, fit_intercept=True)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from statebridge.errors import FitError
from statebridge.translate.moments import Moments

DEFAULT_ALPHAS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_TIE = 1e-12  # squared errors this close, relative to the receiver's spread, differ by rounding only


class AffineRidge:
    """One affine ridge map per group, alpha chosen per group on validation moments.

    Parameters
    ----------
    alphas
        The grid. With `relative`, each value is multiplied by trace(S_xx) / Dx of the group, which makes
        the choice independent of the number of rows and of the scale of the source.
    relative
        False takes the values as they are, in scikit-learn's meaning.

    Attributes
    ----------
    weight_, bias_ : Tensor [G, Dx, Dy], [G, Dy], float64
    choice_ : Tensor [G], int64
        Index of the chosen value in `alphas`.
    alpha_ : Tensor [G], float64
        The chosen alpha itself, in scikit-learn's meaning.
    path_error_ : Tensor [len(alphas), G], float64
        Relative validation error |Y_hat - Y| / |Y - mean Y| of every alpha. Below about 1e-8 it is rounding.
    validation_error_ : Tensor [G], float64
        The same for the chosen alpha.
    copy_error_ : Tensor [G], float64, or None where Dx differs from Dy
        The same for the plain copy Y_hat = X.

    Notes
    -----
    Among errors that differ by rounding only, the largest alpha is taken: the choice then does not depend
    on batching or on the number of processes. Directions in which the source does not vary (constant
    channels, fewer rows than channels) get weight 0, as in the minimum-norm solution.
    """

    def __init__(self, alphas: Sequence[float] = DEFAULT_ALPHAS, relative: bool = True) -> None:
        self.alphas = alphas
        self.relative = relative

    @torch.no_grad()
    def fit(self, train: Moments, validation: Moments) -> AffineRidge:
        """Fit on the moments of the training rows and choose alpha on those of the validation rows.

        Raises
        ------
        FitError
            If the grid is empty or negative, the two moments differ in shape, either has fewer than two
            rows, or a group's moments are not finite.
        """
        self._check(train, validation)
        grid = self._grid(train.sxx)  # [L, G]
        values, vectors = torch.linalg.eigh(train.sxx)  # [G, Dx], [G, Dx, Dx]
        values = values.clamp_min(0.0)
        rotated_xy = vectors.mT @ train.sxy  # [G, Dx, Dy]

        valid_xx = vectors.mT @ validation.sxx @ vectors  # all in the eigenbasis of S_xx
        valid_xy = vectors.mT @ validation.sxy
        shift_x = ((validation.mean_x - train.mean_x)[:, None] @ vectors)[:, 0]  # [G, Dx]
        shift_y = validation.mean_y - train.mean_y  # [G, Dy]
        spread = validation.syy.sum(1)  # [G]

        squares = []
        for alpha in grid:
            weight = inverse_shifted(values, alpha)[..., None] * rotated_xy  # [G, Dx, Dy]
            offset = shift_y - (shift_x[:, None] @ weight)[:, 0]
            squares.append(
                spread
                - 2 * (weight * valid_xy).sum((1, 2))
                + (weight * (valid_xx @ weight)).sum((1, 2))
                + validation.count * offset.square().sum(1)
            )
        path = torch.stack(squares)  # [L, G]
        self.choice_ = choose(path, grid, spread)
        self.alpha_ = grid.gather(0, self.choice_[None])[0]
        self.path_error_ = relative_error(path, spread)
        self.validation_error_ = self.path_error_.gather(0, self.choice_[None])[0]
        self.copy_error_ = _copy_error(validation, spread)
        self.weight_ = vectors @ (inverse_shifted(values, self.alpha_)[..., None] * rotated_xy)
        self.bias_ = train.mean_y - (train.mean_x[:, None] @ self.weight_)[:, 0]
        return self

    def _grid(self, sxx: Tensor) -> Tensor:
        grid = torch.tensor(self.alphas, dtype=torch.float64, device=sxx.device)[:, None]
        scale = sxx.diagonal(dim1=-2, dim2=-1).mean(-1)  # trace / Dx, [G]
        return grid * scale if self.relative else grid.expand(-1, len(sxx))

    def _check(self, train: Moments, validation: Moments) -> None:
        check_grid(self.alphas)
        if train.sxy.shape != validation.sxy.shape:
            raise FitError(
                f"Training moments of shape {list(train.sxy.shape)} and validation moments of shape "
                f"{list(validation.sxy.shape)} do not belong together. Accumulate both the same way."
            )
        for moments, role in ((train, "training"), (validation, "validation")):
            if moments.count < 2:
                raise FitError(
                    f"An affine map needs at least two {role} rows, found {moments.count}. "
                    f"Add {role} documents."
                )
            bad = ~(torch.isfinite(moments.sxx).all(2).all(1) & torch.isfinite(moments.sxy).all(2).all(1))
            if bad.any():
                name = moments.names[int(bad.nonzero()[0])]
                raise FitError(f"The {role} moments of {name} are not finite. Accumulate them again.")


def check_grid(alphas: Sequence[float], positive: bool = False) -> None:
    """Refuse an empty grid, a negative value, and 0 where a strictly positive one is needed."""
    if not alphas or any(not alpha >= 0 or (positive and alpha == 0) for alpha in alphas):
        kind = "positive" if positive else "non-negative"
        raise FitError(f"The grid of alphas must hold {kind} numbers, found {list(alphas)}. Change `alphas`.")


def inverse_shifted(values: Tensor, alpha: Tensor) -> Tensor:
    """Return 1 / (values + alpha) for eigenvalues `[..., D]` and alpha `[...]`, 0 for eigenvalues that are rounding.

    Along such a direction the source does not vary, so its exact coefficient is 0, whatever alpha is.
    """
    floor = values.amax(-1, keepdim=True) * values.shape[-1] * torch.finfo(values.dtype).eps
    return torch.where(values > floor, 1.0 / (values + alpha[..., None]), 0.0)


def choose(squares: Tensor, grid: Tensor, spread: Tensor) -> Tensor:
    """Return the index of the smallest squared error per group; ties go to the largest alpha.

    `squares` and `grid` are `[L, G]`; `spread`, the receiver's summed squares, is `[G]`.
    """
    tied = squares.clamp_min(0.0) <= squares.clamp_min(0.0).amin(0) + _TIE * spread
    return torch.where(tied, grid, -1.0).argmax(0)


def relative_error(squares: Tensor, spread: Tensor) -> Tensor:
    """Return sqrt(squares / spread); 0 / 0 is 0, anything else over 0 is infinite."""
    squares = squares.clamp_min(0.0)
    return torch.where(squares > 0, squares / spread, torch.zeros_like(squares)).sqrt()


def _copy_error(validation: Moments, spread: Tensor) -> Tensor | None:
    if validation.sxx.shape != validation.sxy.shape:
        return None
    squares = (
        spread
        - 2 * validation.sxy.diagonal(dim1=-2, dim2=-1).sum(-1)
        + validation.sxx.diagonal(dim1=-2, dim2=-1).sum(-1)
        + validation.count * (validation.mean_y - validation.mean_x).square().sum(1)
    )
    return relative_error(squares, spread)
