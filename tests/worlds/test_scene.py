"""The world: seeded, independent of its batch, solid, and seen as a plain ray caster sees it."""

from __future__ import annotations

import dataclasses
import math

import torch

from statebridge.worlds import Camera
from statebridge.worlds.motion import BACK, FORWARD, LEFT, RADIUS, RIGHT, STAY, STEP, TURN, relative, walk
from statebridge.worlds.render import render
from statebridge.worlds.scene import Scene, make_scenes, start_poses
from statebridge.worlds.trajectories import draw_actions, look_away_and_back

CAMERA = Camera(size=32)
SEEDS = torch.arange(40, 52)


def test_a_scene_is_its_seed_and_nothing_beside_it() -> None:
    many, one = make_scenes(SEEDS), make_scenes(SEEDS[5:6])
    for field in dataclasses.fields(Scene):
        assert torch.equal(getattr(many, field.name)[5:6], getattr(one, field.name)), field.name
    assert torch.equal(draw_actions(SEEDS, 50)[5:6], draw_actions(SEEDS[5:6], 50))
    a, b = render(many, start_poses(many)[:, None], CAMERA), render(one, start_poses(one)[:, None], CAMERA)
    assert torch.equal(a.frames[5:6], b.frames)
    assert len({tuple(row.flatten().tolist()) for row in many.places}) == len(SEEDS)


def test_objects_of_a_scene_are_distinct_and_inside_their_rooms() -> None:
    scene = make_scenes(torch.arange(300))
    kinds = scene.shapes + 4 * scene.colours
    assert all(len(set(row)) == 8 for row in kinds.tolist())
    near = torch.cdist(scene.places, scene.places) + 9 * torch.eye(8)
    assert near.min() > 2 * 0.45 + 2 * RADIUS - 0.3  # one can pass between any two
    right = (scene.places > scene.crossing[:, None]).long()
    room = right[..., 0] + 2 * right[..., 1]
    assert torch.equal(room, torch.arange(8).expand_as(room) // 2)


def test_turning_moves_the_picture_by_whole_columns() -> None:
    scene = make_scenes(SEEDS)
    start = start_poses(scene)
    before, after = (
        render(scene, walk(scene, start, torch.full((12, 1), a)), Camera()) for a in (STAY, LEFT)
    )
    moved = round(TURN / (math.pi / 2) * 64)
    assert moved == 16
    same = (before.frames[..., : 64 - moved] - after.frames[..., moved:]).abs().amax(2) < 0.02
    assert same.float().mean() > 0.995  # float32 rounding decides pixels on an edge
    assert (before.frames - after.frames).abs().mean() > 0.1


def test_looking_away_and_back_is_the_same_frame_to_the_bit() -> None:
    scene = make_scenes(SEEDS)
    start = start_poses(scene)
    actions = torch.tensor([STAY, *look_away_and_back(5), *look_away_and_back(7, 2, left=False)]).expand(
        12, -1
    )
    seen = render(scene, walk(scene, start, actions), CAMERA).frames
    assert torch.equal(seen[:, 0], seen[:, 10])
    assert torch.equal(seen[:, 0], seen[:, -1])


def test_walls_are_where_a_plain_ray_caster_finds_them() -> None:
    scene = make_scenes(SEEDS[:3])
    poses = walk(scene, start_poses(scene), draw_actions(SEEDS[:3], 9))
    depths = render(scene, poses, CAMERA).depths
    for n in range(3):
        for f in (0, 8):
            x, y, yaw = poses[n, f].tolist()
            for column in range(0, 32, 3):
                phi = yaw + CAMERA.fov / 2 - (column + 0.5) * CAMERA.fov / 32
                dx, dy = math.cos(phi), math.sin(phi)
                best = math.inf
                for x0, y0, x1, y1 in scene.segments[n].tolist():
                    t = (x0 - x) / dx if x0 == x1 else (y0 - y) / dy
                    px, py = x + t * dx, y + t * dy
                    inside = (
                        min(y0, y1) <= py <= max(y0, y1) if x0 == x1 else min(x0, x1) <= px <= max(x0, x1)
                    )
                    if t > 0 and inside:
                        best = min(best, t)
                assert abs(depths[n, f, column] - best) < 1e-3  # float32 against float64


def test_every_room_has_walls_of_its_own() -> None:
    """Paint the walls of a room in one colour, stand in it, and look at each wall of it."""
    scene = make_scenes(SEEDS)
    palette = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0]])
    paints = palette.repeat_interleave(4, dim=0)[None, :, None].expand(len(SEEDS), 16, 2, 3)
    painted = dataclasses.replace(scene, paints=paints, places=torch.full_like(scene.places, 1000.0))
    size = scene.segments[..., 2:].amax(1)
    ends = torch.stack([torch.zeros_like(size), scene.crossing, size], dim=1)  # [N, 3, 2]
    for room in range(4):
        grid, axis = torch.tensor([room % 2, room // 2]), torch.arange(2)
        low, high = ends[:, grid, axis], ends[:, grid + 1, axis]
        centre = ((low + high) / 2)[:, None].expand(-1, 4, -1)
        yaw = (torch.arange(4) * math.pi / 2).expand(len(SEEDS), -1)
        poses = torch.cat([centre, yaw[..., None]], dim=-1)
        seen = render(painted, poses, CAMERA)
        phi = poses[..., 2, None] + CAMERA.azimuths(32)
        hit = centre[:, :, None] + seen.depths[..., None] * torch.stack([phi.cos(), phi.sin()], dim=-1)
        inside = ((hit > low[:, None, None] - 0.01) & (hit < high[:, None, None] + 0.01)).all(
            -1
        )  # not through a door
        assert inside.float().mean() > 0.5
        colours = (seen.frames[:, :, :, 16] > -0.5).movedim(2, -1)[inside]  # the row at eye height
        assert torch.equal(colours, (palette[room] > 0).expand_as(colours))


def test_the_nearest_object_hides_what_is_behind_it() -> None:
    """Put a pillar straight ahead, then a bigger ball behind it: the middle of the picture stays the pillar's."""
    scene = make_scenes(SEEDS[:1])
    places, shapes = scene.places.clone(), torch.zeros_like(scene.shapes)
    pose = start_poses(scene)
    ahead = torch.tensor([pose[0, 2].cos(), pose[0, 2].sin()])
    places[0] = 1000.0
    places[0, 2], places[0, 6] = pose[0, :2] + 0.8 * ahead, pose[0, :2] + 1.1 * ahead
    shapes[0, 6] = 2
    labels = render(dataclasses.replace(scene, places=places, shapes=shapes), pose[:, None], CAMERA).labels[
        0, 0
    ]
    assert set(labels[:, 15:17].unique().tolist()) == {2}
    alone = places.clone()
    alone[0, 2] = 1000.0
    behind = render(dataclasses.replace(scene, places=alone, shapes=shapes), pose[:, None], CAMERA).labels[
        0, 0
    ]
    assert (behind == 6).any()
    assert (behind == 6).sum() < 32 * 32 / 2


def test_nobody_walks_through_walls_or_objects() -> None:
    seeds = torch.arange(200)
    scene = make_scenes(seeds)
    poses = walk(scene, start_poses(scene), draw_actions(seeds, 120))
    gap = torch.cdist(poses[..., :2], scene.places) - scene.radii[:, None]
    assert gap.min() > RADIUS - 1e-4
    steps = (poses[:, 1:, :2] - poses[:, :-1, :2]).norm(dim=-1)
    wanted = draw_actions(seeds, 120)[:, 1:] >= FORWARD
    assert ((steps < 1e-6) | ((steps - STEP).abs() < 1e-4)).all()
    assert 0.3 < (steps[wanted] > 0).float().mean() < 0.95  # some are stopped, most are not
    outer = scene.segments[..., 2:].amax(1)[:, None]
    assert ((poses[..., :2] > RADIUS - 1e-4) & (poses[..., :2] < outer - RADIUS + 1e-4)).all()


def test_relative_poses_begin_at_the_origin_and_keep_distances() -> None:
    scene = make_scenes(SEEDS)
    start = start_poses(scene)
    poses = walk(scene, start, torch.tensor([STAY, FORWARD, LEFT, FORWARD, RIGHT, BACK]).expand(12, -1))
    seen = relative(poses, poses[:, 0])
    assert torch.equal(seen[:, 0], torch.zeros(12, 3))
    torch.testing.assert_close(seen[..., :2].norm(dim=-1), (poses[..., :2] - poses[:, :1, :2]).norm(dim=-1))
    free = seen[:, 1, 0] > 0
    assert free.any()
    torch.testing.assert_close(
        seen[free, 1, :2], torch.tensor([STEP, 0.0]).expand(int(free.sum()), 2), atol=1e-5, rtol=0
    )
