"""Sequences of the training run: walks through fresh scenes, chunks picked from them, rendered on the device.

A sequence is a function of the run's seed and its number. Walks are simulated many steps at a time, because a
walk is a chain of tiny operations; frames are rendered when a step needs them. Seeds of training stay below
`HELD_OUT`, those of validation and judging start there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from experiments.small_world.config import Phase, TrainConfig
from statebridge.worlds import Conditioning
from statebridge.worlds.draws import uniform
from statebridge.worlds.motion import relative, walk
from statebridge.worlds.render import render
from statebridge.worlds.scene import Scene, make_scenes, start_poses
from statebridge.worlds.trajectories import draw_actions

Tensor = torch.Tensor

HELD_OUT = 2**31  # first seed that training never uses
_AHEAD = 32  # steps whose walks are simulated together


@dataclass(frozen=True)
class Batch:
    """Sequences of one step.

    Attributes
    ----------
    frames
        float32 [B, N * F, 3, size, size] in [-1, 1] for N chunks of F frames.
    conditioning
        Actions, poses and times of these frames.
    """

    frames: Tensor
    conditioning: Conditioning


class Batches:
    """The sequences of each step of a phase, by step number."""

    def __init__(self, config: TrainConfig, phase: Phase, first_seed: int, device: torch.device) -> None:
        self.config, self.phase, self.first_seed, self.device = config, phase, first_seed, device
        self._begin = -1

    def step(self, number: int) -> Batch:
        """The batch of a step."""
        begin = number // _AHEAD * _AHEAD
        if begin != self._begin:
            self._begin = begin
            first = self.first_seed + begin * self.phase.sequences
            seeds = torch.arange(first, first + _AHEAD * self.phase.sequences, device=self.device)
            self._scenes, self._poses, self._walked = sequences(self.config, self.phase.chunks, seeds)
        low = (number - begin) * self.phase.sequences
        rows = torch.arange(low, low + self.phase.sequences, device=self.device)
        walked = self._walked
        picked = Conditioning(walked.actions[rows], walked.poses[rows], walked.times[rows])
        frames = render(self._scenes.rows(rows), self._poses[rows], self.config.model.camera).frames
        return Batch(frames, picked)


def sequences(config: TrainConfig, chunks: int, seeds: Tensor) -> tuple[Scene, Tensor, Conditioning]:
    """Scenes, absolute poses [N, chunks * F, 3] and conditioning of the sequences of these seeds."""
    F = config.model.grid.frames
    scenes = make_scenes(seeds)
    start = start_poses(scenes)
    actions = draw_actions(seeds, config.walk_chunks * F)
    poses = walk(scenes, start, actions)
    frames = _picked(seeds, chunks, config.walk_chunks, F)  # [N, chunks * F]
    actions = actions.gather(1, frames)
    poses = poses.gather(1, frames[..., None].expand(-1, -1, 3))
    times = (frames - frames[:, :1]).float()
    return scenes, poses, Conditioning(actions, relative(poses, poses[:, 0]), times)


def _picked(seeds: Tensor, chunks: int, walked: int, frames: int) -> Tensor:
    """Frame numbers of the chunks that a sequence holds: runs with gaps, or (two in five) without."""
    u, v = uniform(seeds, 300, chunks), uniform(seeds, 301, chunks)
    gap = torch.where(u < 0.25, 1 + (v * 8).floor(), 0.0).long()
    gap[:, 0] = 0
    gap = torch.where(uniform(seeds, 302, 1) < 0.4, 0, gap)
    number = torch.arange(chunks, device=seeds.device) + gap.cumsum(1).clamp_(max=walked - chunks)
    return (number[..., None] * frames + torch.arange(frames, device=seeds.device)).flatten(1)
