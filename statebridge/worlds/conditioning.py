"""What the denoiser is told about a chunk: actions, camera poses and times, as coordinates and ray features.

A pose is (x, y, yaw) relative to where the session began. Each patch looks along a ray with origin (x, y) and
azimuth φ = yaw + offset(column). Its features are sines and cosines of the azimuth, of the origin, and of the
ray's moment m = x sin φ - y cos φ (the distance of its line from the start), which two patches share when one
walks along its own line of sight. Attention can so find earlier views of the same wall by geometry.

Knows the camera and the grid; no scene and no model. Source of ray moments: Plücker coordinates in the plane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from statebridge.errors import StateMismatch
from statebridge.worlds.geometry import Camera, Grid
from statebridge.worlds.rotary import CIRCLE

Tensor = torch.Tensor

_TURNS = (1.0, 2.0, 4.0, 8.0, 16.0)  # azimuth, whole turns a circle
_ROWS = (1.0, 2.0, 4.0)
_ORIGIN = (32.0, 16.0, 8.0, 4.0, 2.0, 1.0)  # periods in world units
_MOMENT = (16.0, 8.0, 4.0, 2.0, 1.0)
FEATURES = 2 * (len(_TURNS) + len(_ROWS) + 2 * len(_ORIGIN) + len(_MOMENT))


@dataclass(frozen=True)
class Conditioning:
    """What is known about the frames of one chunk (or of many chunks in a row).

    Attributes
    ----------
    actions
        Action that led to each frame, int64 [B, F].
    poses
        Camera of each frame relative to the session's start, float32 [B, F, 3]: x, y in world units, yaw in
        radians.
    times
        Time of each frame in frames, float32 [B, F]. A clock, not a count of what is remembered.

    Raises
    ------
    StateMismatch
        When the shapes do not belong together.
    """

    actions: Tensor
    poses: Tensor
    times: Tensor

    def __post_init__(self) -> None:
        B, F = self.actions.shape
        found = {"poses": tuple(self.poses.shape), "times": tuple(self.times.shape)}
        expected = {"poses": (B, F, 3), "times": (B, F)}
        wrong = {name: (expected[name], found[name]) for name in found if expected[name] != found[name]}
        if wrong:
            raise StateMismatch("the conditioning of a chunk does not fit its actions", wrong)

    def frames(self, start: int, stop: int) -> Conditioning:
        """The conditioning of some of the frames."""
        return Conditioning(self.actions[:, start:stop], self.poses[:, start:stop], self.times[:, start:stop])

    def coordinates(self, camera: Camera, grid: Grid) -> Tensor:
        """Coordinates (t, h, w) of every token, float32 [B, F * rows * columns, 3]."""
        B, F = self.actions.shape
        shape = (B, F, grid.rows, grid.columns)
        azimuth = self._azimuth(camera, grid)[:, :, None, :] * (CIRCLE / (2 * math.pi))
        row = torch.arange(grid.rows, device=self.poses.device, dtype=torch.float32)
        parts = (self.times[:, :, None, None].float(), row[:, None], azimuth)
        return torch.stack([part.expand(shape) for part in parts], dim=-1).reshape(B, -1, 3)

    def features(self, camera: Camera, grid: Grid) -> Tensor:
        """Ray features of every token, float32 [B, F * rows * columns, FEATURES]."""
        B, F = self.actions.shape
        azimuth = self._azimuth(camera, grid)  # [B, F, columns]
        x, y = self.poses[..., 0, None], self.poses[..., 1, None]  # [B, F, 1]
        moment = x * azimuth.sin() - y * azimuth.cos()
        row = torch.arange(grid.rows, device=azimuth.device, dtype=torch.float32)
        groups = [
            _waves(azimuth, _TURNS),
            *(_waves(origin.expand_as(azimuth), [2 * math.pi / p for p in _ORIGIN]) for origin in (x, y)),
            _waves(moment, [2 * math.pi / p for p in _MOMENT]),
        ]
        by_column = torch.cat(groups, dim=-1)[:, :, None]  # [B, F, 1, columns, f]
        by_row = _waves(row * (math.pi / 8), _ROWS)[:, None]  # [rows, 1, f]
        shape = (B, F, grid.rows, grid.columns)
        both = [part.expand(*shape, part.shape[-1]) for part in (by_column, by_row)]
        return torch.cat(both, dim=-1).reshape(B, -1, FEATURES)

    def _azimuth(self, camera: Camera, grid: Grid) -> Tensor:
        offsets = camera.azimuths(grid.columns, self.poses.device)
        return self.poses[..., 2, None].float() + offsets  # [B, F, columns]


def _waves(values: Tensor, frequencies: tuple[float, ...] | list[float]) -> Tensor:
    phase = values[..., None] * torch.tensor(frequencies, device=values.device)
    return torch.cat([phase.sin(), phase.cos()], dim=-1)
