"""Agreement of two next-token distributions, position by position, from full-vocabulary logits.

    top-1 = [argmax p = argmax q]
    KL    = sum_v p_v (log p_v - log q_v)                        in nats, reference first
    JS    = KL(p | m) / 2 + KL(q | m) / 2,  m = (p + q) / 2      in nats, at most log 2

Positions are worked through in chunks, so that a vocabulary of 248,320 does not need several copies of all
logits. This module does not know documents or arms; average over the axis of interest afterwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from statebridge.errors import StatebridgeError

_CELLS = 1 << 23  # logits worked on at a time


@dataclass(frozen=True, eq=False)
class TokenAgreement:
    """Agreement per position; every field has the shape of the logits without their last axis.

    Parameters
    ----------
    top1
        bool, True where both distributions have the same most probable token.
    kl, js
        Divergences in nats, in the dtype of the computation.
    """

    top1: Tensor
    kl: Tensor
    js: Tensor


@torch.no_grad()
def token_agreement(
    reference: Tensor, logits: Tensor, dtype: torch.dtype = torch.float32, cells: int = _CELLS
) -> TokenAgreement:
    """Compare next-token distributions.

    Parameters
    ----------
    reference, logits
        `[..., V]` of any floating dtype, on one device; minus infinity is allowed (a masked token).
    dtype
        float32 or float64, in which the divergences are computed.
    cells
        Logits worked on at a time; bounds the memory, does not change the answer.

    Raises
    ------
    StatebridgeError
        If shapes differ, or a position holds NaN, plus infinity or no possible token (its index is named).

    Notes
    -----
    KL is infinite where the reference gives weight to a token that the other rules out. Rounding below 0
    is cut off.
    """
    if reference.shape != logits.shape or reference.ndim < 1 or not reference.shape[-1]:
        raise StatebridgeError(
            f"Logits of shape {list(reference.shape)} and {list(logits.shape)} cannot be compared. "
            "Score the same positions with the same vocabulary."
        )
    shape, vocabulary = reference.shape[:-1], reference.shape[-1]
    p_rows, q_rows = reference.reshape(-1, vocabulary), logits.reshape(-1, vocabulary)
    step = max(1, cells // vocabulary)
    top1, kl, js = [], [], []
    for start in range(0, len(p_rows), step):
        p, q = (rows[start : start + step].to(dtype) for rows in (p_rows, q_rows))
        _require_usable(p, start, "reference")
        _require_usable(q, start, "compared")
        top1.append(p.argmax(-1) == q.argmax(-1))
        log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
        log_m = torch.logaddexp(log_p, log_q) - math.log(2)
        kl.append(_divergence(log_p, log_q))
        js.append((_divergence(log_p, log_m) + _divergence(log_q, log_m)) / 2)
    if not top1:
        empty = torch.empty(shape, dtype=dtype, device=logits.device)
        return TokenAgreement(empty.bool(), empty, empty.clone())
    return TokenAgreement(*(torch.cat(parts).reshape(shape) for parts in (top1, kl, js)))


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    p = log_p.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), torch.zeros_like(p))  # 0 log 0 = 0
    return terms.sum(-1).clamp_min(0.0)


def _require_usable(rows: Tensor, start: int, which: str) -> None:
    bad = ~torch.isfinite(rows.amax(-1))  # NaN and plus infinity show in the maximum, as does an empty row
    if bad.any():
        raise StatebridgeError(
            f"The {which} logits of position {start + int(bad.nonzero()[0])} hold NaN, infinity or no possible "
            "token. Check the state that was installed."
        )
