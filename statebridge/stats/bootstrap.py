"""Percentile bootstrap over documents, seeded, paired by construction.

A document is drawn with all its arms, so a difference or ratio between arms keeps its pairing. The draw
is fixed: `numpy.random.default_rng(seed).integers(0, n, size=(resamples, n))`, a fresh generator for every
interval, then the linear quantiles of the statistic. Working through the resamples in blocks bounds the
memory and does not change the draw. This module does not know what a column measures.

Source: Efron and Tibshirani (1993), chapter 13.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from statebridge.errors import StatebridgeError

Array = NDArray[np.float64]
Statistic = Callable[..., Array]
"""Takes columns `[R, n]` (R resamples of n documents) and returns `[R]`; NaN where it is undefined."""

_CELLS = 4_000_000  # drawn indices held at a time


@dataclass(frozen=True)
class Interval:
    """A point estimate with its percentile interval.

    Parameters
    ----------
    estimate, low, high
        NaN, all three, where the statistic is undefined on the documents as they are.
    level
        Nominal coverage, for example 0.95.
    n
        Documents.
    resamples, seed
        What reproduces the interval.
    """

    estimate: float
    low: float
    high: float
    level: float
    n: int
    resamples: int
    seed: int

    def excludes(self, value: float) -> bool:
        """Say whether the interval lies wholly on one side of `value`; an undefined one never does."""
        return value < self.low or value > self.high

    def __str__(self) -> str:
        """Format as `−0.7473 [−0.8047, −0.6921]`."""
        if np.isnan(self.estimate):
            return "undefined"
        text = f"{self.estimate:.4f} [{self.low:.4f}, {self.high:.4f}]"
        return text.replace("-", "−").replace("inf", "∞")


@dataclass(frozen=True)
class Bootstrap:
    """The recipe of an interval; calling it makes one.

    Parameters
    ----------
    seed
        Seed of the generator, which starts afresh for every interval.
    resamples
        Number of resamples R.
    level
        Nominal coverage.

    Examples
    --------
    >>> print(Bootstrap(seed=0)(mean, [1.0, 2.0, 3.0, 6.0]))
    3.0000 [1.5000, 5.0000]
    """

    seed: int
    resamples: int = 10_000
    level: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.level < 1 or self.resamples < 1:
            raise StatebridgeError(
                f"A bootstrap needs a level between 0 and 1 and at least one resample, found level {self.level} "
                f"and {self.resamples} resamples."
            )

    def __call__(self, statistic: Statistic, *columns: ArrayLike) -> Interval:
        """Return the estimate and interval of a statistic of one or more paired columns.

        Parameters
        ----------
        statistic
            Vectorised over resamples: columns `[R, n]` in, `[R]` out, NaN where undefined.
        *columns
            One value per document each, `[n]`, all of one length and finite.

        Returns
        -------
        Interval
            With one document the interval is infinite, because nothing is known about the spread. A
            resample on which the statistic is undefined counts as minus infinity for the lower bound and
            as plus infinity for the upper one. If it is undefined on the documents themselves, all is NaN.

        Raises
        ------
        StatebridgeError
            If there are no documents, columns differ in length, or a value is not finite.
        """
        arrays = [np.asarray(column, dtype=np.float64) for column in columns]
        n = _documents(arrays)
        estimate = float(statistic(*(array[None] for array in arrays))[0])
        if np.isnan(estimate):
            return self.undefined(n)
        if n == 1:
            return Interval(estimate, -np.inf, np.inf, self.level, n, self.resamples, self.seed)
        rng = np.random.default_rng(self.seed)
        values = np.empty(self.resamples)
        step = max(1, _CELLS // n)
        for start in range(0, self.resamples, step):
            index = rng.integers(0, n, size=(min(step, self.resamples - start), n))
            values[start : start + step] = statistic(*(array[index] for array in arrays))
        tail = round((1 - self.level) / 2, 12)  # exactly 0.025 at 0.95
        low = _quantile(values, tail, undefined=-np.inf)
        high = _quantile(values, 1 - tail, undefined=np.inf)
        return Interval(estimate, low, high, self.level, n, self.resamples, self.seed)

    def undefined(self, n: int) -> Interval:
        """Return the interval of a statistic that `n` documents leave undefined."""
        return Interval(np.nan, np.nan, np.nan, self.level, n, self.resamples, self.seed)


def mean(column: Array) -> Array:
    """Return the mean over documents, `[R, n]` to `[R]`."""
    return np.asarray(column.mean(axis=-1))


def ratio_of_means(numerator: Array, denominator: Array) -> Array:
    """Return mean(numerator) / mean(denominator), `[R, n]` twice to `[R]`; NaN unless the denominator is positive."""
    return positive_ratio(mean(numerator), mean(denominator))


def positive_ratio(numerator: Array, denominator: Array) -> Array:
    """Return numerator / denominator, NaN unless the denominator is positive."""
    out = np.full(denominator.shape, np.nan)
    np.divide(numerator, denominator, out=out, where=denominator > 0)
    return out


def _documents(arrays: list[Array]) -> int:
    shapes = {array.shape for array in arrays}
    if len(shapes) != 1 or any(array.ndim != 1 for array in arrays) or not arrays[0].size:
        raise StatebridgeError(
            f"A paired bootstrap needs columns of one value per document, all equally long and not empty, found "
            f"shapes {[array.shape for array in arrays]}. Align the documents of all arms first."
        )
    for position, array in enumerate(arrays):
        bad = np.flatnonzero(~np.isfinite(array))
        if bad.size:
            raise StatebridgeError(
                f"Column {position} holds {array[bad[0]]} at document {bad[0]}. "
                "Leave the document out of every arm, or score it again."
            )
    return len(arrays[0])


def _quantile(values: Array, q: float, undefined: float) -> float:
    missing = np.isnan(values)
    if not missing.any():
        return float(np.quantile(values, q))
    # no interpolation here: between a number and infinity there is nothing to interpolate
    filled = np.where(missing, undefined, values)
    return float(np.quantile(filled, q, method="lower" if undefined < 0 else "higher"))
