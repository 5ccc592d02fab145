"""The gradient kernel of fla's gated delta rule, as batched matrix products.

flash-linear-attention 0.6.0 refuses `chunk_bwd_dqkwg` on Hopper GPUs with Triton 3.4 to 3.7.0, which
compile it wrongly. This is the same function: per chunk of 64 positions, with g the cumulated log2 decay
inside the chunk, h the state before it, dh the gradient of the state after it and v the corrected values,

    o      = scale (exp2(g) q h + tril(q kᵀ exp2(g_i − g_j)) v)
    h_next = exp2(g_last) h + (k exp2(g_last − g))ᵀ v,      v = u − w h

and dq, dk, dw, dg follow by the chain rule. Knows nothing about models; `install` puts it in fla's place.
Source: fla-core 0.6.0, fla/ops/common/chunk_o.py.
"""

from __future__ import annotations

import importlib

import torch
from torch.nn import functional as F  # noqa: N812 (its usual name)


def chunk_bwd_dqkwg(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    h: torch.Tensor,
    dh: torch.Tensor,
    w: torch.Tensor,
    g: torch.Tensor,
    dv: torch.Tensor,
    scale: float,
    chunk_size: int = 64,
    **unsupported: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of one gated delta rule with respect to q, k, w and the cumulated decay g.

    Parameters
    ----------
    q, k, w
        ``[B, T, H, K]``; as many key heads as value heads.
    v, do, dv
        ``[B, T, H, V]``: corrected values, gradient of the output, gradient of the corrected values.
    h, dh
        ``[B, N, H, K, V]`` for N chunks: states before each chunk, gradients of the states after it.
    g
        ``[B, T, H]`` float32, cumulated inside each chunk, in log2 units.
    scale, chunk_size
        Query scale; positions per chunk.

    Returns
    -------
    tuple
        dq, dk, dw in the dtypes of q, k, w, and dg ``[B, T, H]`` float32, of the cumulated decay in natural
        units, as fla's kernel gives it (the reverse cumulation follows there).
    """
    if any(value not in (None, False) for value in unsupported.values()):
        raise NotImplementedError(f"only plain batches are covered, not {sorted(unsupported)}")
    B, T, H, _ = k.shape
    if q.shape[2] != v.shape[2]:
        raise NotImplementedError("as many key heads as value heads are needed: repeat the keys first")
    N = h.shape[1]
    pad = N * chunk_size - T

    def chunks(x: torch.Tensor) -> torch.Tensor:  # [B, T, H, D] -> [B, N, H, chunk, D], zeros behind T
        x = F.pad(x, (0, 0, 0, 0, 0, pad)) if pad else x
        return x.reshape(B, N, chunk_size, H, -1).transpose(2, 3)

    def whole(x: torch.Tensor) -> torch.Tensor:  # and back
        # Contiguous, because fla's next kernel computes addresses from the shape alone.
        return x.transpose(2, 3).reshape(B, N * chunk_size, H, -1)[:, :T].contiguous()

    qc, kc, vc, doc, dvc = (chunks(x) for x in (q, k, v, do, dv.to(v.dtype)))
    h, dh = h.to(v.dtype), dh.to(v.dtype)
    # Padded rows repeat the last decay: every exponent stays finite, and v = do = 0 there removes them.
    gc = torch.cat([g, g[:, -1:].expand(B, pad, H)], 1) if pad else g
    gc = gc.reshape(B, N, chunk_size, H).transpose(2, 3).float()  # [B, N, H, chunk]
    last = gc[..., -1:]
    dw = -(dvc @ h.mT)
    dq = (doc @ h.mT).float() * (gc.exp2() * scale)[..., None]
    dk = (vc @ dh.mT).float() * (last - gc).exp2()[..., None]
    dg_last = (h.float() * dh.float()).sum((-1, -2)) * last[..., 0].exp2() + (dk * kc.float()).sum((-1, -2))
    keep = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril()
    decay = (gc[..., :, None] - gc[..., None, :]).masked_fill(~keep, float("-inf")).exp2()
    ds = ((doc @ vc.mT).float() * decay * scale).to(k.dtype)  # [B, N, H, chunk, chunk]
    dq = dq + (ds @ kc).float()
    dk = dk + (ds.mT @ qc).float()
    dg = (dq * qc.float()).sum(-1) - (dk * kc.float()).sum(-1)  # [B, N, H, chunk]
    # The gradient through the chunk's last decay belongs to its last real row.
    dg[..., -1] += dg_last
    if pad:
        dg[:, -1, :, chunk_size - 1 - pad] += dg_last[:, -1]
    return whole(dq).to(q.dtype), whole(dk).to(k.dtype), whole(dw).to(w.dtype), whole(dg[..., None])[..., 0]


def install(compiled: bool = False) -> None:
    """Put the function above in the place of fla's kernel, optionally through torch.compile."""
    module = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    module.chunk_bwd_dqkwg = torch.compile(chunk_bwd_dqkwg, dynamic=False) if compiled else chunk_bwd_dqkwg
