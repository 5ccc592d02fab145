"""Tasks that need memory: an object is looked at early, left for the rest of a minute, and looked at again.

The camera stands in a room, its back to a target object. It turns to the target, looks, turns away, and stays
away until the context ends: in place, turning about (reappear), or through the rooms and back along the same
way (revisit). Then it turns to the target again; these frames are generated and judged. All poses and pictures
are the world's own, and the view that has to come back was seen from exactly this place. Candidates where the
target shows itself in between are dropped, so nothing but the early look can tell what stands there.

Knows scenes, actions and the renderer, no model.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from statebridge.errors import PruneError
from statebridge.worlds.conditioning import Conditioning
from statebridge.worlds.draws import uniform
from statebridge.worlds.geometry import Camera
from statebridge.worlds.motion import BACK, FORWARD, LEFT, RIGHT, STAY, TURN, relative, walk
from statebridge.worlds.render import render
from statebridge.worlds.scene import Scene, make_scenes, start_poses
from statebridge.worlds.trajectories import draw_actions

KINDS = ("reappear", "revisit")
_HALF = 8  # turns of half a circle
_LOOK = 4  # frames that rest on the target
_LEAD = 8  # frames before the first look, so that no sink holds it
#: A frame of the context that looks at the target.
LOOK = _LEAD + _HALF + _LOOK // 2
_AWAY = 5  # turns to each side of "away" that do not show the target
_RENDERED = 8  # scenes at a time
_STREAM = 300


@dataclass(frozen=True, eq=False)
class Tasks:
    """Tasks with their ground truth.

    Attributes
    ----------
    seeds
        Scene of each task, int64 [N].
    kinds
        Index into KINDS, int64 [N].
    actions
        int64 [N, T].
    poses
        Relative to the start, float32 [N, T, 3].
    frames
        The world's pictures in [-1, 1], float32 [N, T, 3, size, size].
    target
        Pixels of the target object in the judged frames, bool [N, T - context, size, size].
    context
        Frames that are observed; the rest is generated.
    """

    seeds: Tensor
    kinds: Tensor
    actions: Tensor
    poses: Tensor
    frames: Tensor
    target: Tensor
    context: int

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self.seeds)

    @property
    def truth(self) -> Tensor:
        """The frames that are to be generated, [N, T - context, 3, size, size]."""
        return self.frames[:, self.context :]

    @property
    def names(self) -> list[str]:
        """Name of each task."""
        pairs = zip(self.kinds.tolist(), self.seeds.tolist(), strict=True)
        return [f"{KINDS[kind]}-{seed}" for kind, seed in pairs]

    def rows(self, index: slice | Tensor) -> Tasks:
        """Return some of the tasks."""
        fields = ("seeds", "kinds", "actions", "poses", "frames", "target")
        return dataclasses.replace(self, **{name: getattr(self, name)[index] for name in fields})

    def condition(self, first: int, count: int) -> Conditioning:
        """Return the conditioning of some frames of all tasks."""
        times = torch.arange(first, first + count, dtype=torch.float32, device=self.actions.device)
        span = slice(first, first + count)
        return Conditioning(self.actions[:, span], self.poses[:, span], times.expand(len(self), count))


def make_tasks(
    count: int, seed: int, context: int = 240, device: torch.device | str = "cpu", tries: int = 3
) -> Tasks:
    """Make `count` tasks, both kinds alternating.

    Parameters
    ----------
    seed
        Of the first candidate scene; `count * tries` seeds from there on are candidates.
    context
        Frames that are observed, a multiple of the chunk.
    tries
        Candidates for each task.

    Raises
    ------
    PruneError
        When the context is too short to look and leave, or the candidates do not suffice.
    """
    shortest = _LEAD + 2 * _HALF + _LOOK + 8
    if context < shortest:
        raise PruneError(
            f"A context of {context} frames is too short to look and leave; give at least {shortest}."
        )
    made: list[Tasks] = []
    for kind in range(len(KINDS)):
        wanted = (count + 1 - kind) // 2
        found, first = 0, seed + kind * (count * tries // 2 + 1)
        for start in range(first, first + wanted * tries, _RENDERED):
            if found >= wanted:
                break
            # rows past what is wanted are made and dropped: scenes go by numbers, not by how many are asked for
            seeds = torch.arange(start, start + _RENDERED, device=device)
            batch = _candidates(seeds, kind, context)
            batch = batch.rows(slice(0, wanted - found))
            found += len(batch)
            made.append(batch)
        if found < wanted:
            raise PruneError(f"Only {found} of {wanted} {KINDS[kind]} tasks came out of {tries} tries each.")
    fields = ("seeds", "kinds", "actions", "poses", "frames", "target")
    whole = Tasks(**{name: torch.cat([getattr(t, name) for t in made]) for name in fields}, context=context)
    # alternate the kinds, so that any prefix of the tasks holds both
    order = torch.argsort(torch.cat([torch.arange(int((whole.kinds == k).sum())) * 2 + k for k in range(2)]))
    return whole.rows(order.to(device))


def _candidates(seeds: Tensor, kind: int, context: int) -> Tasks:
    """The tasks among these scenes that hide their target for as long as they should."""
    scene = make_scenes(seeds)
    start = start_poses(scene)
    room = (start[:, 0] > scene.crossing[:, 0]).long() + 2 * (start[:, 1] > scene.crossing[:, 1]).long()
    target = 2 * room + (uniform(seeds, _STREAM, 1)[:, 0] < 0.5).long()  # one of the room's two objects
    rows = torch.arange(len(seeds), device=seeds.device)
    towards = scene.places[rows, target] - start[:, :2]
    start[:, 2] = torch.atan2(towards[:, 1], towards[:, 0]) - _HALF * TURN
    actions = _actions(scene, start, target, kind, context)
    poses = walk(scene, start, actions)
    seen = render(scene, poses)
    label = seen.labels == target[:, None, None, None]
    visible = label.flatten(2).sum(2)  # [N, T] pixels
    shown = context - (_LEAD + 2 * _HALF + _LOOK)  # frames between the two looks
    hidden = (visible[:, :_LEAD] == 0).all(1) & (visible[:, context - shown : context] == 0).all(1)
    looked = visible[:, _LEAD + _HALF : _LEAD + _HALF + _LOOK].amin(1) >= 24
    again = visible[:, context + _HALF :].amin(1) >= 24
    good = (hidden & looked & again).nonzero()[:, 0]
    return Tasks(
        seeds, torch.full_like(seeds, kind), actions, relative(poses, start), seen.frames, label[:, context:], context
    ).rows(good)  # fmt: skip


def _actions(scene: Scene, start: Tensor, target: Tensor, kind: int, context: int) -> Tensor:
    """Lead, look, leave, and look again, int64 [N, T]."""
    N, device = len(start), start.device
    side = uniform(scene.seeds, _STREAM + 1, 1) < 0.5  # [N, 1]
    there = torch.where(side, LEFT, RIGHT).expand(N, _HALF)
    back = torch.where(side, RIGHT, LEFT).expand(N, _HALF)
    stay = torch.full((N, _LEAD), STAY, device=device)
    away = context - (_LEAD + 2 * _HALF + _LOOK)
    between = _turn_about(scene.seeds, away) if kind == 0 else _there_and_back(scene, start, target, away)
    parts = [stay, there, stay[:, :_LOOK], back, between, there, stay[:, :_LOOK]]
    return torch.cat(parts, 1)


def _turn_about(seeds: Tensor, length: int) -> Tensor:
    """Turn and rest without showing the target, ending where it began: int64 [N, length]."""
    u = uniform(seeds, _STREAM + 2, 2 * length).view(-1, length, 2)
    offset = torch.zeros_like(seeds)
    heading = torch.where(u[:, 0, 0] < 0.5, 1, -1)
    taken = []
    for i in range(length):
        heading = torch.where(u[:, i, 0] < 0.15, -heading, heading)
        heading = torch.where((offset + heading).abs() > _AWAY, -heading, heading)
        move = torch.where(u[:, i, 1] < 0.25, 0, heading)
        move = torch.where(offset.abs() >= length - i, -offset.sign(), move)  # time to go back
        # going back late must not overshoot the frames that are left
        move = torch.where((offset + move).abs() > length - i - 1, -offset.sign(), move)
        offset = offset + move
        taken.append(torch.where(move > 0, LEFT, torch.where(move < 0, RIGHT, STAY)))
    return torch.stack(taken, 1)


def _there_and_back(scene: Scene, start: Tensor, target: Tensor, length: int) -> Tensor:
    """A walk that never looks the target's way, and the same walk undone: int64 [N, length]."""
    wanted = draw_actions(scene.seeds, length // 2, stream=_STREAM + 3)
    other = torch.tensor([STAY, RIGHT, LEFT, STAY, STAY], device=wanted.device)  # instead, by action
    pose, taken = start, []
    for proposal in wanted.unbind(1):
        for action in (proposal, other[proposal], torch.full_like(proposal, STAY)):
            then = walk(scene, pose, action[:, None])[:, 0]
            # a step into a wall cannot be undone by a step back
            stopped = (then[:, :2] == pose[:, :2]).all(1) & ((action == FORWARD) | (action == BACK))
            allowed = ~stopped & ~_in_view(scene, target, then)
            if action is proposal:
                chosen, moved, done = action, then, allowed
            else:
                chosen = torch.where(done, chosen, action)
                moved = torch.where(done[:, None], moved, then)
                done = done | allowed
        pose = moved
        taken.append(chosen)
    out = torch.stack(taken, 1)
    undo = torch.tensor([STAY, RIGHT, LEFT, BACK, FORWARD], device=out.device)  # by action
    rest = torch.full((len(out), length - 2 * out.shape[1]), STAY, device=out.device)
    return torch.cat([out, rest, undo[out].flip(1)], 1)


def _in_view(scene: Scene, target: Tensor, pose: Tensor) -> Tensor:
    """Whether the target, were there no walls, would be in the picture, bool [N]."""
    rows = torch.arange(len(pose), device=pose.device)
    towards = scene.places[rows, target] - pose[:, :2]
    bearing = torch.atan2(towards[:, 1], towards[:, 0]) - pose[:, 2]
    off = (bearing + math.pi).remainder(math.tau) - math.pi
    wide = torch.asin((scene.radii[rows, target] / towards.norm(dim=1)).clamp(max=1.0))
    return off.abs() < Camera().fov / 2 + wide + 0.05
