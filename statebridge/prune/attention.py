"""Attention over a history in head groups, and how much of it goes where.

The own keys of a chunk come last. Masks are made from the slots that are there: padding of shorter rows takes no
part in the softmax. Knows tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from statebridge.worlds.cache import History, RotatedSlots


def attend_groups(layer: int, query: Tensor, key: Tensor, value: Tensor, history: History) -> Tensor:
    """Attend from a chunk to a history and to itself.

    Parameters
    ----------
    layer
        Index of the layer.
    query
        Rotated queries [B, H, N, D].
    key, value
        The chunk's own [B, H, M, D], keys rotated; M may exceed N where a model pads.
    history
        Head groups; together they hold every head once.

    Returns
    -------
    mixed
        [B, H, N, D].
    """
    out = torch.empty_like(query)
    for group in history:
        heads = list(group.heads[layer])
        if heads:
            k, v, mask = _joined(layer, key[:, heads], value[:, heads], group)
            out[:, heads] = F.scaled_dot_product_attention(query[:, heads], k, v, attn_mask=mask)
    return out


def chosen_mass(layer: int, query: Tensor, key: Tensor, history: History, chosen: Tensor) -> Tensor:
    """Return the share of attention [H] on the chosen slots, bool [B, S], mean over rows and queries.

    The history must be one group, as before any head is treated apart.
    """
    (group,) = history
    k, _, mask = _joined(layer, key, key, group)
    scores = query.float() @ k.float().transpose(2, 3) * query.shape[-1] ** -0.5  # [B, H, N, S + N]
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1)[..., : chosen.shape[1]]
    mass: Tensor = (weights * chosen[:, None, None]).sum(-1).mean((0, 2))
    return mass


def _joined(
    layer: int, key: Tensor, value: Tensor, group: RotatedSlots
) -> tuple[Tensor, Tensor, Tensor | None]:
    k = torch.cat([group.keys[layer].to(key.dtype), key], 2)
    v = torch.cat([group.values[layer].to(value.dtype), value], 2) if value is not key else k
    mask = None
    if group.valid is not None:
        mask = F.pad(group.valid, (0, key.shape[2]), value=True)[:, None, None]  # [B, 1, 1, S + M]
    return k, v, mask
