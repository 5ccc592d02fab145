"""Scenes: four rooms with doors between them, sixteen textured walls, eight objects no two of which are alike.

A scene is a function of its seed. Rooms are numbered 0 to 3 (x, then y); every room has four walls of its own
texture, so both sides of a wall between two rooms differ, and two objects. All scenes of a batch have the same
number of walls and objects, so that they are plain tensors and whole batches are cast at once.

Knows no camera and no pixels.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from statebridge.worlds.draws import choice, permutation, uniform

Tensor = torch.Tensor

WALL_HEIGHT = 2.2
SHAPES = ("pillar", "box", "ball", "cone")
COLOURS = ("red", "green", "blue", "yellow", "magenta", "cyan")
OBJECTS = 8
_DOOR = 0.8  # half the width of a door

#: Colours of objects, as COLOURS.
OBJECT_RGB = (
    (0.9, 0.1, 0.1),
    (0.1, 0.75, 0.15),
    (0.1, 0.25, 0.95),
    (0.95, 0.85, 0.1),
    (0.9, 0.15, 0.8),
    (0.1, 0.85, 0.85),
)
#: Radius of each shape's footprint, as SHAPES; a box's is that of its corners.
RADII = (0.28, 0.45, 0.42, 0.45)


@dataclass(frozen=True)
class Scene:
    """A batch of N scenes; every field has the scene as its first axis.

    Attributes
    ----------
    seeds
        int64 [N].
    segments
        Walls from (x0, y0) to (x1, y1), float32 [N, 16, 4], each along an axis.
    textures
        Texture of the left and of the right side of each segment, int64 [N, 16, 2], into the next three.
    paints
        Two colours of each texture, float32 [N, 16, 2, 3] in [0, 1].
    patterns
        0 upright stripes, 1 checks, 2 bands, 3 a wide panel, int64 [N, 16].
    periods
        Length of a pattern along the wall, float32 [N, 16].
    crossing
        Where the walls between rooms cross, float32 [N, 2].
    floors
        Colour of each room's floor, float32 [N, 4, 3].
    places
        Centre of each object, float32 [N, 8, 2].
    shapes, colours
        Kind of each object, int64 [N, 8]; no two objects of a scene share both.
    turns
        Angle by which a box is turned, float32 [N, 8].
    """

    seeds: Tensor
    segments: Tensor
    textures: Tensor
    paints: Tensor
    patterns: Tensor
    periods: Tensor
    crossing: Tensor
    floors: Tensor
    places: Tensor
    shapes: Tensor
    colours: Tensor
    turns: Tensor

    @property
    def radii(self) -> Tensor:
        """Radius of each object's footprint, float32 [N, 8]."""
        return torch.tensor(RADII, device=self.seeds.device)[self.shapes]

    def rows(self, index: Tensor) -> Scene:
        """Some of the scenes, by number."""
        return Scene(*(getattr(self, field.name)[index] for field in dataclasses.fields(self)))


def make_scenes(seeds: Tensor) -> Scene:
    """The scenes of these seeds, int64 [N], on the seeds' device."""
    u = uniform(seeds, 0, 16)
    size = 8.0 + 2.0 * u[:, :2]
    crossing = size * (0.42 + 0.16 * u[:, 2:4])
    segments, textures = _walls(size, crossing, u[:, 4:8])
    places = _places(seeds, size, crossing)
    kinds = permutation(seeds, 1, len(SHAPES) * len(COLOURS))[:, :OBJECTS]
    hue = uniform(seeds, 2, 32).view(-1, 16, 2)
    light = uniform(seeds, 3, 32).view(-1, 16, 2)
    light = torch.stack([0.30 + 0.25 * light[..., 0], 0.65 + 0.3 * light[..., 1]], dim=-1)
    floor_hue, floor_light = uniform(seeds, 4, 4), 0.25 + 0.3 * uniform(seeds, 5, 4)
    return Scene(
        seeds=seeds,
        segments=segments,
        textures=textures.expand(len(seeds), -1, -1),
        paints=_rgb(hue, light, 0.55),
        patterns=choice(seeds, 6, 16, 4),
        periods=0.9 + 0.9 * uniform(seeds, 7, 16),
        crossing=crossing,
        floors=_rgb(floor_hue, floor_light, 0.25),
        places=places,
        shapes=kinds % len(SHAPES),
        colours=kinds // len(SHAPES),
        turns=uniform(seeds, 8, OBJECTS) * (math.pi / 2),
    )


def start_poses(scene: Scene, stream: int = 0) -> Tensor:
    """A place near the centre of a random room, looking anywhere: x, y, yaw, float32 [N, 3]."""
    u = uniform(scene.seeds, 100 + stream, 4)
    room = (u[:, 0] * 4).long()
    side = torch.stack([room % 2, room // 2], dim=1).float()  # [N, 2]
    size = scene.segments[..., 2:].amax(dim=1)  # outer walls begin at 0
    centre = torch.where(side > 0, (scene.crossing + size) / 2, scene.crossing / 2)
    return torch.cat([centre + 0.6 * (u[:, 1:3] - 0.5), (2 * math.pi * u[:, 3])[:, None]], dim=1)


def _walls(size: Tensor, crossing: Tensor, doors: Tensor) -> tuple[Tensor, Tensor]:
    """Segments [N, 16, 4] and the textures of their sides [16, 2]; along y upwards, along x downwards.

    With these directions the left side of a wall is the one with the smaller coordinate. Texture r * 4 + w is
    wall w of room r: 0 outer along x, 1 outer along y, 2 inner along x, 3 inner along y.
    """
    (X, Y), (cx, cy) = size.unbind(1), crossing.unbind(1)
    zero = torch.zeros_like(X)
    segments: list[Tensor] = []
    sides: list[tuple[int, int]] = []

    def along_x(start: Tensor, end: Tensor, y: Tensor, below: int, above: int) -> None:
        segments.append(torch.stack([end, y, start, y], dim=1))
        sides.append((below, above))

    def along_y(start: Tensor, end: Tensor, x: Tensor, left: int, right: int) -> None:
        segments.append(torch.stack([x, start, x, end], dim=1))
        sides.append((left, right))

    for ix, (x0, x1) in enumerate(((zero, cx), (cx, X))):
        low, high = ix, ix + 2  # rooms below and above
        along_x(x0, x1, zero, low * 4, low * 4)
        along_x(x0, x1, Y, high * 4, high * 4)
        door = x0 + (x1 - x0) * (0.35 + 0.3 * doors[:, ix])
        along_x(x0, door - _DOOR, cy, low * 4 + 2, high * 4 + 2)
        along_x(door + _DOOR, x1, cy, low * 4 + 2, high * 4 + 2)
    for iy, (y0, y1) in enumerate(((zero, cy), (cy, Y))):
        low, high = 2 * iy, 2 * iy + 1  # rooms left and right
        along_y(y0, y1, zero, low * 4 + 1, low * 4 + 1)
        along_y(y0, y1, X, high * 4 + 1, high * 4 + 1)
        door = y0 + (y1 - y0) * (0.35 + 0.3 * doors[:, 2 + iy])
        along_y(y0, door - _DOOR, cx, low * 4 + 3, high * 4 + 3)
        along_y(door + _DOOR, y1, cx, low * 4 + 3, high * 4 + 3)
    return torch.stack(segments, dim=1), torch.tensor(sides, device=size.device)


def _places(seeds: Tensor, size: Tensor, crossing: Tensor) -> Tensor:
    """Two corners of each room, moved a little: [N, 8, 2]."""
    corners = [permutation(seeds * 4 + room, 10, 4)[:, :2] for room in range(4)]
    corner = torch.stack(corners, dim=1)  # [N, 4, 2]
    offset = torch.stack([corner % 2, corner // 2], dim=-1).float() - 0.5  # [N, 4, 2, 2]
    ends = torch.stack([torch.zeros_like(size), crossing, size], dim=1)  # [N, 3, 2]
    room = torch.arange(4, device=seeds.device)
    grid = torch.stack([room % 2, room // 2], dim=1)  # [4, 2]
    axis = torch.arange(2, device=seeds.device)
    low, high = ends[:, grid, axis], ends[:, grid + 1, axis]  # [N, 4, 2]
    jitter = 0.3 * (uniform(seeds, 9, 16).view(-1, 4, 2, 2) - 0.5)
    return ((low + high)[:, :, None] / 2 + offset * 0.56 * (high - low)[:, :, None] + jitter).flatten(1, 2)


def _rgb(hue: Tensor, light: Tensor, chroma: float) -> Tensor:
    """Colours [..., 3] on a circle of hues around a grey of the given lightness."""
    angles = 2 * math.pi * (hue[..., None] + torch.tensor([0.0, 1 / 3, 2 / 3], device=hue.device))
    return (light[..., None] * (1 + chroma * angles.cos())).clamp(0, 1)
