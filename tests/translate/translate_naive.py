"""Plain loops with numpy and scikit-learn that say what the translators must answer. Oracles, not code to use."""

from __future__ import annotations

import numpy as np
from sklearn.linear_model import Ridge
from torch import Tensor


def affine_heads(x: Tensor, y: Tensor, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Ridge per head over all tokens of `[B, H, T, D]`; weight `[H, D_s, D_r]`, bias `[H, D_r]`."""
    weights, biases = [], []
    for h in range(x.shape[1]):
        rows_x = np.array([x[b, h, t].double().numpy() for b in range(x.shape[0]) for t in range(x.shape[2])])
        rows_y = np.array([y[b, h, t].double().numpy() for b in range(x.shape[0]) for t in range(x.shape[2])])
        model = Ridge(alpha, fit_intercept=True).fit(rows_x, rows_y)
        weights.append(model.coef_.T)
        biases.append(model.intercept_)
    return np.stack(weights), np.stack(biases)


def affine_blocks(
    source: Tensor, receiver: Tensor, blocks: tuple[tuple[int, int], ...], alpha: float, x: Tensor
) -> np.ndarray:
    """Ridge per block over all (state, tap) rows of `[B, C, W]`, applied to `x`."""
    out = np.zeros(x.shape)
    for start, size in blocks:
        rows = [
            np.array(
                [
                    c[b, start : start + size, w].double().numpy()
                    for b in range(c.shape[0])
                    for w in range(c.shape[2])
                ]
            )
            for c in (source, receiver)
        ]
        model = Ridge(alpha, fit_intercept=True).fit(*rows)
        for b in range(x.shape[0]):
            for w in range(x.shape[2]):
                row = x[b, start : start + size, w].double().numpy()
                out[b, start : start + size, w] = model.predict(row[None])[0]
    return out


def bilinear_heads(source: Tensor, receiver: Tensor, lam: float, sweeps: int, x: Tensor) -> np.ndarray:
    """Alternating ridge per head on `[n, H, K, V]`, started at the identity, applied to `x`."""
    out = np.zeros((x.shape[0], *receiver.shape[1:]))
    for h in range(x.shape[1]):
        s, r = source[:, h].double().numpy(), receiver[:, h].double().numpy()
        mean_s, mean_r = s.mean(0), r.mean(0)
        s, r = s - mean_s, r - mean_r
        left, right = np.eye(r.shape[1], s.shape[1]), np.eye(r.shape[2], s.shape[2])
        for _ in range(sweeps):
            left = _relative_ridge(
                np.concatenate([(m @ right.T).T for m in s]), np.concatenate([m.T for m in r]), lam
            )
            right = _relative_ridge(np.concatenate([left @ m for m in s]), np.concatenate(list(r)), lam)
        for b in range(x.shape[0]):
            out[b, h] = mean_r + left @ (x[b, h].double().numpy() - mean_s) @ right.T
    return out


def _relative_ridge(rows: np.ndarray, targets: np.ndarray, lam: float) -> np.ndarray:
    alpha = lam * np.square(rows).sum() / rows.shape[1]
    return Ridge(alpha, fit_intercept=False).fit(rows, targets).coef_
