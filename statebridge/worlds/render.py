"""A ray caster over batches: frames x columns x walls, then one pass over the pixels for each object.

Every column is one ray in the plane. The nearest wall gives a depth and a place along the wall; a pixel's height
there says wall, floor or ceiling. Objects are footprints with a silhouette: a pillar and a box have a front, a
ball and a cone an outline at the depth of their centre. All is plain tensor arithmetic, the same on every device
up to rounding, and exact from run to run on one.

Knows scenes and the camera, no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from statebridge.worlds.geometry import Camera
from statebridge.worlds.scene import OBJECT_RGB, OBJECTS, WALL_HEIGHT, Scene

Tensor = torch.Tensor

_FAR = 1e4
_BOX = 0.32  # half a side
_BOX_HEIGHT, _CONE_HEIGHT, _BALL_CENTRE = 0.95, 1.7, 0.75


@dataclass(frozen=True)
class Rendered:
    """What the camera saw.

    Attributes
    ----------
    frames
        float32 [N, F, 3, size, size] in [-1, 1].
    labels
        Number of the object at each pixel, -1 elsewhere, int8 [N, F, size, size].
    depths
        Distance in the plane to the wall of each column, float32 [N, F, size].
    """

    frames: Tensor
    labels: Tensor
    depths: Tensor


def render(scene: Scene, poses: Tensor, camera: Camera | None = None) -> Rendered:
    """Look from absolute poses float32 [N, F, 3] in the scene of each row."""
    camera = camera or Camera()
    size = camera.size
    phi = poses[..., 2, None] + camera.azimuths(size, poses.device)  # [N, F, size]
    ray = torch.stack([phi.cos(), phi.sin()], dim=-1)  # [N, F, size, 2]
    origin = poses[..., None, :2]  # [N, F, 1, 2]
    depth, paint, pattern, period, along = _nearest_wall(scene, origin, ray)
    slope = camera.slopes(size, poses.device)[:, None]  # [rows, 1]
    height = camera.eye + slope * depth[..., None, :]  # [N, F, rows, columns]
    image = _wall_colours(paint, pattern, period, along, height)
    image = image * _light(depth)[..., None, :, None]
    ground = _ground(scene, origin, ray, camera, slope)
    image = torch.where((height < 0)[..., None], ground, image)
    above = (WALL_HEIGHT - camera.eye) / slope.clamp_min(1e-6)
    ceiling = (0.85 * _light(above))[..., None].expand(*image.shape)
    image = torch.where((height > WALL_HEIGHT)[..., None], ceiling, image)
    image, labels = _objects(scene, origin, ray, camera, slope, depth, image)
    return Rendered((2 * image - 1).movedim(-1, 2), labels, depth)


def _light(distance: Tensor) -> Tensor:
    return 1 / (1 + 0.1 * distance)


def _cross(a: Tensor, b: Tensor) -> Tensor:
    return a[..., 0] * b[..., 1] - a[..., 1] * b[..., 0]


def _nearest_wall(scene: Scene, origin: Tensor, ray: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Depth, the two paints, pattern, period and place along the wall of each column."""
    begin = scene.segments[:, None, None, :, :2]  # [N, 1, 1, M, 2]
    edge = scene.segments[:, None, None, :, 2:] - begin
    offset = begin - origin[..., None, :]  # [N, F, 1, M, 2]
    facing = _cross(ray[..., None, :], edge)  # [N, F, columns, M]
    facing = torch.where(facing.abs() < 1e-9, 1e-9, facing)
    distance = _cross(offset, edge) / facing
    share = _cross(offset, ray[..., None, :]) / facing
    # a hair beyond both ends, so that no ray slips through a corner
    hit = (distance > 0) & (share > -1e-4) & (share < 1 + 1e-4)
    depth, wall = torch.where(hit, distance, _FAR).min(dim=-1)  # [N, F, columns]
    right = _cross(edge, -offset).squeeze(2) < 0  # [N, F, M], which side of a wall the camera is on
    rows = torch.arange(len(depth), device=depth.device)[:, None, None]
    side = right.gather(2, wall).long()
    texture = scene.textures[rows, wall, side]
    point = origin + depth[..., None] * ray
    return (
        depth,
        scene.paints[rows, texture],
        scene.patterns[rows, texture],
        scene.periods[rows, texture],
        point.sum(-1),  # walls lie along an axis: x + y runs along them
    )


def _wall_colours(paint: Tensor, pattern: Tensor, period: Tensor, along: Tensor, height: Tensor) -> Tensor:
    phase = (along / period).remainder(1.0)[..., None, :]  # [N, F, 1, columns]
    upper = (height / WALL_HEIGHT * 3).floor().remainder(2) > 0
    kind = pattern[..., None, :]
    stripe = (phase < 0.5) & (kind != 2)
    second = torch.where(kind == 1, stripe ^ upper, stripe)
    second = torch.where(kind == 2, upper, second)
    second = torch.where(kind == 3, (phase < 0.7) & upper, second)
    first, other = paint[..., None, :, 0, :], paint[..., None, :, 1, :]
    return torch.where(second[..., None], other, first)


def _ground(scene: Scene, origin: Tensor, ray: Tensor, camera: Camera, slope: Tensor) -> Tensor:
    distance = camera.eye / (-slope).clamp_min(1e-6)  # [rows, 1]
    x = origin[..., None, :, 0] + distance * ray[..., None, :, 0]  # [N, F, rows, columns]
    y = origin[..., None, :, 1] + distance * ray[..., None, :, 1]
    crossing = scene.crossing[:, None, None, None]
    room = (x > crossing[..., 0]).long() + 2 * (y > crossing[..., 1]).long()
    rows = torch.arange(len(room), device=room.device)[:, None, None, None]
    return scene.floors[rows, room] * _light(distance)[..., None]


def _objects(
    scene: Scene, origin: Tensor, ray: Tensor, camera: Camera, slope: Tensor, depth: Tensor, image: Tensor
) -> tuple[Tensor, Tensor]:
    nearest = depth[..., None, :].expand(image.shape[:-1])
    labels = torch.full(image.shape[:-1], -1, dtype=torch.int8, device=image.device)
    palette = torch.tensor(OBJECT_RGB, device=image.device)
    radii = scene.radii
    for k in range(OBJECTS):
        centre = scene.places[:, None, None, k] - origin  # [N, F, 1, 2]
        middle = (centre * ray).sum(-1)  # [N, F, columns], where the ray is closest to the centre
        miss = _cross(ray, centre)
        radius = radii[:, k, None, None]
        chord = (radius**2 - miss**2).clamp_min(0).sqrt()
        shape = scene.shapes[:, k, None, None]
        box, side = _box(centre, ray, scene.turns[:, k, None, None])
        front = torch.where(shape == 0, middle - chord, middle)
        front = torch.where(shape == 1, box, front)
        seen = (front > 0) & (front < _FAR) & ((miss.abs() < radius) | (shape == 1))
        tilt = torch.where(shape == 1, side, miss / radius)  # -1 to 1 across the object
        height = camera.eye + slope * front[..., None, :]  # [N, F, rows, columns]
        kind = shape[..., None, :]
        top = torch.where(kind == 1, _BOX_HEIGHT, WALL_HEIGHT)
        cone = _CONE_HEIGHT * (1 - miss.abs() / radius)[..., None, :]
        inside = (height > 0) & (height < torch.where(kind == 3, cone, top))
        ball = (height - _BALL_CENTRE).abs() < chord[..., None, :]
        inside = torch.where(kind == 2, ball, inside) & seen[..., None, :]
        inside &= front[..., None, :] < nearest
        light = (_light(front) * (0.8 + 0.2 * tilt))[..., None, :, None]
        colour = palette[scene.colours[:, k]][:, None, None, None] * light
        image = torch.where(inside[..., None], colour, image)
        nearest = torch.where(inside, front[..., None, :], nearest)
        labels = labels.masked_fill(inside, k)
    return image, labels


def _box(centre: Tensor, ray: Tensor, turn: Tensor) -> tuple[Tensor, Tensor]:
    """Depth at which a ray enters a turned square, _FAR where it misses, and ±0.6 for the side it enters by."""
    cos, sin = turn.cos(), turn.sin()

    def turned(v: Tensor) -> Tensor:
        return torch.stack([v[..., 0] * cos + v[..., 1] * sin, v[..., 1] * cos - v[..., 0] * sin], dim=-1)

    direction = turned(ray)
    direction = torch.where(direction.abs() < 1e-9, 1e-9, direction)
    middle = turned(centre).expand(direction.shape)
    a, b = (middle - _BOX) / direction, (middle + _BOX) / direction
    enter, leave = torch.minimum(a, b), torch.maximum(a, b)
    first = enter.amax(-1)
    hit = (first > 0) & (first < leave.amin(-1))
    side = torch.where(enter[..., 0] > enter[..., 1], 0.6, -0.6)
    return torch.where(hit, first, _FAR), side
