"""Distances between two outcomes of a probe. Shapes that differ and values that are no numbers are infinitely far.

Knows arrays only. A runtime's own measure is any function of two outcomes that gives a float.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from statebridge.errors import FingerprintError


def checked_eps(eps: float) -> float:
    """A distance up to which two outcomes count as the same."""
    if not 0 <= eps < math.inf:
        raise FingerprintError(
            f"No outcomes can be told apart with eps = {eps}; give a finite number from 0."
        )
    return eps


def max_difference(one: npt.ArrayLike, other: npt.ArrayLike) -> float:
    """Largest absolute difference of two arrays of one shape; 0 for empty ones."""
    a, b = (np.asarray(x, np.float64) for x in (one, other))
    if a.shape != b.shape:
        return math.inf
    found = float(np.abs(a - b).max(initial=0.0))
    return math.inf if math.isnan(found) else found


def mean_divergence(logits: npt.ArrayLike, other: npt.ArrayLike) -> float:
    """Mean over positions of KL(softmax(logits) ‖ softmax(other)), in nats; logits [..., vocabulary]."""
    a, b = (_log_softmax(np.asarray(x, np.float64)) for x in (logits, other))
    if a.shape != b.shape:
        return math.inf
    found = float((np.exp(a) * (a - b)).sum(-1).mean()) if a.size else 0.0
    return math.inf if math.isnan(found) else max(found, 0.0)


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    found: npt.NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found
