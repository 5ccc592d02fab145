"""The one camera and the one token grid of the small world: numbers, and what follows from them.

The camera is cylindrical: a column is an azimuth, columns are equally far apart in angle, a row is a slope.
A turn of 22.5 degrees therefore moves the picture by exactly two patches, and a patch has one world azimuth.

    azimuth(column c) = yaw + fov / 2 - (c + 1/2) fov / size          slope(row r) = slope (1 - (2 r + 1) / size)

Knows no scenes, no pixels and no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from statebridge.errors import ConfigError

Tensor = torch.Tensor


@dataclass(frozen=True)
class Camera:
    """The camera of all frames.

    Attributes
    ----------
    size
        Pixels along each side of a frame.
    fov
        Horizontal angle of view in radians.
    slope
        Rise over run at the upper edge of a frame; the lower edge has its negative.
    eye
        Height of the camera above the floor.
    """

    size: int = 64
    fov: float = math.pi / 2
    slope: float = 0.7
    eye: float = 1.0

    def azimuths(self, columns: int, device: torch.device | str = "cpu") -> Tensor:
        """Angles float32 [columns] from the optical axis to the centres of equal columns, left (+) to right."""
        centres = (torch.arange(columns, device=device) + 0.5) / columns
        return self.fov * (0.5 - centres)

    def slopes(self, rows: int, device: torch.device | str = "cpu") -> Tensor:
        """Slopes float32 [rows] of the centres of equal rows, top (+) to bottom."""
        centres = (torch.arange(rows, device=device) + 0.5) / rows
        return self.slope * (1 - 2 * centres)


@dataclass(frozen=True)
class Grid:
    """How frames become tokens.

    Attributes
    ----------
    patch
        Pixels along each side of a patch.
    rows, columns
        Patches of a frame.
    frames
        Frames of a chunk, which are denoised together.

    Raises
    ------
    ConfigError
        When a number is below 1.
    """

    patch: int = 8
    rows: int = 8
    columns: int = 8
    frames: int = 4

    def __post_init__(self) -> None:
        if min(self.patch, self.rows, self.columns, self.frames) < 1:
            raise ConfigError(f"The grid {self} has a side below 1; give positive numbers.")

    @property
    def frame_tokens(self) -> int:
        """Tokens of a frame."""
        return self.rows * self.columns

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.frames * self.frame_tokens

    @property
    def channels(self) -> int:
        """Values of a patch."""
        return 3 * self.patch**2

    def patchify(self, frames: Tensor) -> Tensor:
        """Frames [..., F, 3, size, size] to tokens [..., F * rows * columns, channels], row-major in a frame."""
        *lead, F, _, _, _ = frames.shape
        p = self.patch
        tiles = frames.reshape(*lead, F, 3, self.rows, p, self.columns, p)
        n = len(lead)
        order = (*range(n), n, n + 2, n + 4, n + 1, n + 3, n + 5)
        return tiles.permute(order).reshape(*lead, F * self.frame_tokens, self.channels)

    def unpatchify(self, tokens: Tensor) -> Tensor:
        """Tokens [..., F * rows * columns, channels] back to frames [..., F, 3, size, size]."""
        *lead, T, _ = tokens.shape
        p, F = self.patch, T // self.frame_tokens
        tiles = tokens.reshape(*lead, F, self.rows, self.columns, 3, p, p)
        n = len(lead)
        order = (*range(n), n, n + 3, n + 1, n + 4, n + 2, n + 5)
        return tiles.permute(order).reshape(*lead, F, 3, self.rows * p, self.columns * p)
