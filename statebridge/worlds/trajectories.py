"""Walks worth remembering: actions as a chain of small routines, so that places are left and seen again.

Routines are short strings of actions: look away and back, a full circle, a square, out and back, a few steps, a
rest. A policy gives each family a weight; a walk is a function of its seed. Which walks a model is judged on is
decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from statebridge.worlds.draws import uniform
from statebridge.worlds.motion import BACK, FORWARD, LEFT, RIGHT, STAY

Tensor = torch.Tensor


def look_away_and_back(turns: int, rest: int = 0, left: bool = True) -> list[int]:
    """Turn one way, rest, and turn back by as much."""
    there, back = (LEFT, RIGHT) if left else (RIGHT, LEFT)
    return [there] * turns + [STAY] * rest + [back] * turns


def _families() -> dict[str, list[list[int]]]:
    both = ((LEFT, RIGHT), (RIGHT, LEFT))
    return {
        "walk": [[FORWARD] * n for n in range(1, 6)] + [[BACK] * n for n in (1, 2)],
        "turn": [[a] * n for a, _ in both for n in range(1, 7)],
        "away": [
            look_away_and_back(n, m, left) for n in range(2, 9) for m in (0, 2, 4) for left in (True, False)
        ],
        "circle": [[a] * 16 for a, _ in both],
        "square": [([FORWARD] * n + [a] * 4) * 4 for a, _ in both for n in (1, 2, 3)],
        "return": [[FORWARD] * n + [BACK] * n for n in (1, 2, 3, 4)]
        + [[FORWARD] * n + [a] * 8 + [FORWARD] * n + [a] * 8 for a, _ in both for n in (1, 2, 3)],
        "rest": [[STAY] * n for n in (1, 2, 4, 8)],
    }


FAMILIES = _families()

#: Weights of the families in training: half of the time is spent leaving and coming back.
TRAINING: dict[str, float] = {
    "walk": 0.30, "turn": 0.22, "away": 0.2, "circle": 0.07, "square": 0.07, "return": 0.08, "rest": 0.06,
}  # fmt: skip


def draw_actions(
    seeds: Tensor, length: int, policy: Mapping[str, float] | None = None, stream: int = 200
) -> Tensor:
    """Actions int64 [N, length] of the walks of these seeds; the first is to stay, where the walk begins."""
    weights = policy or TRAINING
    routines = [(r, w / len(FAMILIES[name])) for name, w in weights.items() for r in FAMILIES[name]]
    longest = max(len(r) for r, _ in routines)
    table = torch.tensor([r + [STAY] * (longest - len(r)) for r, _ in routines], device=seeds.device)
    lengths = torch.tensor([len(r) for r, _ in routines], device=seeds.device)
    edges = torch.tensor([w for _, w in routines], device=seeds.device).cumsum(0)
    u = uniform(seeds, stream, length)  # one routine an action is more than enough
    drawn = torch.searchsorted(edges / edges[-1], u).clamp_(max=len(routines) - 1)  # [N, length]
    ends = lengths[drawn].cumsum(1)
    when = torch.arange(length - 1, device=seeds.device).expand(len(seeds), -1).contiguous()
    which = torch.searchsorted(ends, when, right=True)  # the routine that is running at each moment
    begun = (ends - lengths[drawn]).gather(1, which)
    actions = table[drawn.gather(1, which), when - begun]
    return torch.cat([torch.full_like(actions[:, :1], STAY), actions], dim=1)
