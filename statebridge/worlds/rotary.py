"""Rotary positions over time, height and azimuth, rotated when keys are read and never before.

A token has three coordinates (t, h, w): its time in frames, its patch row, and the world azimuth of its ray in
patches (32 around the circle). Channel pair i of a head turns by θ_i = frequency_i · coordinate[axis_i].
Azimuth frequencies are whole turns a circle, so that looking the same way after any number of turns is the same
position. Coordinates are real numbers: a fractional or moved t is as good as any.

Knows coordinates and frequencies, no model. Source: Su et al., "RoFormer", arXiv 2104.09864.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from statebridge.errors import ConfigError

Tensor = torch.Tensor

TIME, HEIGHT, AZIMUTH = 0, 1, 2
CIRCLE = 32  # azimuth patches around the full circle


@dataclass(frozen=True)
class Rotary:
    """Frequencies of each channel pair, split over the three axes.

    Attributes
    ----------
    pairs
        Channel pairs of (time, height, azimuth), in this order within a head; channel i pairs with i + D / 2.
    fastest, slowest
        Radians per frame of the first and the last time pair; those between form a geometric series.

    Raises
    ------
    ConfigError
        When an axis has no pair.
    """

    pairs: tuple[int, int, int] = (12, 8, 12)
    fastest: float = 1.0
    slowest: float = 0.002

    def __post_init__(self) -> None:
        if min(self.pairs) < 1:
            raise ConfigError(
                f"The rotary pairs {self.pairs} leave an axis without one; give each at least 1."
            )

    @property
    def head_dim(self) -> int:
        """Channels of a head, all of them rotated."""
        return 2 * sum(self.pairs)

    def frequencies(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Radians a unit, float32 [pairs of the axis], for time, height and azimuth."""
        n_time, n_height, n_azimuth = self.pairs
        steps = torch.arange(n_time, dtype=torch.float64) / max(1, n_time - 1)
        time = self.fastest * (self.slowest / self.fastest) ** steps
        height = torch.arange(1, n_height + 1, dtype=torch.float64) * (math.pi / 8)
        turns = torch.linspace(1, CIRCLE / 2, n_azimuth, dtype=torch.float64).round()
        azimuth = turns * (2 * math.pi / CIRCLE)
        return time.float().to(device), height.float().to(device), azimuth.float().to(device)

    def angles(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine float32 [..., T, D / 2] of coordinates [..., T, 3]."""
        parts = [
            coordinates[..., axis, None].float() * frequency
            for axis, frequency in enumerate(self.frequencies(coordinates.device))
        ]
        theta = torch.cat(parts, dim=-1)
        return theta.cos(), theta.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs of x [B, H, T, D] by angles [B, T, D / 2] (or [T, D / 2]); the dtype of x stays.

    Notes
    -----
    Computed in float32. Turning by the angle with -sin undoes it up to rounding; caches hold raw keys, so
    nothing needs to be undone.
    """
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)  # [B, 1, T, D / 2]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
