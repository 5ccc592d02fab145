"""Moving through a scene: five actions, turns of 22.5 degrees, steps that walls and objects stop.

A step that would bring the camera within its radius of a wall or an object does not happen; the pose stays.
Turns are counted, so that any number of them and back is the same yaw to the bit.

A session that has no scene integrates its pose from moves: how far forward, how far to the left, what turn.

Knows scenes, no pixels and no model.
"""

from __future__ import annotations

import math

import torch

from statebridge.worlds.scene import Scene

Tensor = torch.Tensor

STAY, LEFT, RIGHT, FORWARD, BACK = range(5)
ACTION_NAMES = ("stay", "left", "right", "forward", "back")
TURN = math.pi / 8
STEP = 0.4
RADIUS = 0.3


def turns_of(actions: Tensor) -> Tensor:
    """Turns to the left that each action makes, int64."""
    return (actions == LEFT).long() - (actions == RIGHT).long()


def steps_of(actions: Tensor) -> Tensor:
    """Distance forward that each action asks for, float32."""
    return STEP * ((actions == FORWARD).float() - (actions == BACK).float())


def walk(scene: Scene, start: Tensor, actions: Tensor) -> Tensor:
    """Poses after each action.

    Parameters
    ----------
    start
        x, y and yaw before the first action, float32 [N, 3].
    actions
        int64 [N, T].

    Returns
    -------
    poses
        x, y and yaw after each action, float32 [N, T, 3].
    """
    yaw = start[:, 2, None] + turns_of(actions).cumsum(1) * TURN  # [N, T]
    distance = steps_of(actions)
    moves = torch.stack([distance * yaw.cos(), distance * yaw.sin()], dim=-1)  # [N, T, 2]
    place, places = start[:, :2], []
    for move in moves.unbind(1):
        wanted = place + move
        place = torch.where(_free(scene, wanted)[:, None], wanted, place)
        places.append(place)
    return torch.cat([torch.stack(places, dim=1), yaw[..., None]], dim=-1)


def relative(poses: Tensor, start: Tensor) -> Tensor:
    """Absolute poses [N, T, 3] as seen from a start pose [N, 3], whose own becomes (0, 0, 0)."""
    offset = poses[..., :2] - start[:, None, :2]
    cos, sin = start[:, 2, None].cos(), start[:, 2, None].sin()
    x = offset[..., 0] * cos + offset[..., 1] * sin
    y = offset[..., 1] * cos - offset[..., 0] * sin
    return torch.stack([x, y, poses[..., 2] - start[:, 2, None]], dim=-1)


def integrated(pose: Tensor, moves: Tensor) -> Tensor:
    """Poses float64 [F, 3] after each of the moves [F, 3], which turn first and then go, from a pose [3]."""
    x, y, yaw = pose.tolist()
    poses = []
    for forward, left, turn in moves.tolist():
        yaw += turn
        x += forward * math.cos(yaw) - left * math.sin(yaw)
        y += forward * math.sin(yaw) + left * math.cos(yaw)
        poses.append((x, y, yaw))
    return torch.tensor(poses, dtype=torch.float64)


def moves_of(poses: Tensor) -> Tensor:
    """The moves, float64 [F, 3], between poses in a row [F + 1, 3]: what `integrated` takes."""
    before, after = poses[:-1].double(), poses[1:].double()
    offset, yaw = after[:, :2] - before[:, :2], after[:, 2]
    forward = offset[:, 0] * yaw.cos() + offset[:, 1] * yaw.sin()
    left = offset[:, 1] * yaw.cos() - offset[:, 0] * yaw.sin()
    return torch.stack([forward, left, after[:, 2] - before[:, 2]], dim=1)


def _free(scene: Scene, place: Tensor) -> Tensor:
    """Whether a camera may stand at each place [N, 2], bool [N]."""
    begin, end = scene.segments[..., :2], scene.segments[..., 2:]  # [N, M, 2]
    along = end - begin
    share = ((place[:, None] - begin) * along).sum(-1) / (along * along).sum(-1).clamp_min(1e-6)
    nearest = begin + share.clamp(0, 1)[..., None] * along
    walls = (place[:, None] - nearest).square().sum(-1) > RADIUS**2
    objects = (place[:, None] - scene.places).square().sum(-1) > (scene.radii + RADIUS).square()
    return walls.all(1) & objects.all(1)
