"""How much of one view lies in another: the relevance by which a memory bank is searched.

A view is a sector of the plane: an apex, a direction, the camera's angle, a reach. The share of a wanted view that
an old one saw is counted over fixed points in the sector (no random draws, so retrieval needs no random state).
Walls are not known and do not block. Source: WorldMem, arXiv 2504.12369, retrieves by overlap minus age.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor

_REACH = 5.0
_RINGS, _RAYS = 5, 9


def view_overlap(wanted: Tensor, old: Tensor, fov: float) -> Tensor:
    """Share of each wanted view that each old view covers.

    Parameters
    ----------
    wanted, old
        Poses x, y, yaw: [W, 3] and [M, 3].
    fov
        Angle of view in radians.

    Returns
    -------
    share
        float64 [W, M] in [0, 1].
    """
    device = wanted.device
    distance = _REACH * (torch.arange(_RINGS, device=device, dtype=torch.float64) + 1) / _RINGS
    angle = fov * ((torch.arange(_RAYS, device=device, dtype=torch.float64) + 0.5) / _RAYS - 0.5)
    weight = (distance / distance.sum())[:, None].expand(_RINGS, _RAYS) / _RAYS  # by area
    phi = wanted[:, 2, None].double() + angle  # [W, rays]
    ray = torch.stack([phi.cos(), phi.sin()], dim=-1)
    points = (
        wanted[:, None, None, :2].double() + distance[:, None, None] * ray[:, None]
    )  # [W, rings, rays, 2]
    offset = points[:, None] - old[None, :, None, None, :2].double()  # [W, M, rings, rays, 2]
    bearing = torch.atan2(offset[..., 1], offset[..., 0]) - old[None, :, None, None, 2].double()
    bearing = torch.remainder(bearing + math.pi, 2 * math.pi) - math.pi
    seen = (bearing.abs() <= fov / 2) & (offset.square().sum(-1) <= (1.01 * _REACH) ** 2)
    return (seen * weight).sum(dim=(-1, -2))
