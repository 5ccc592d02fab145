"""A tiny world model with weights that matter, and chunks to feed it."""

from __future__ import annotations

import torch

from statebridge.prune import Policy, PrunedSession, Reindex
from statebridge.prune.adapters.small_world import SmallWorld
from statebridge.worlds import Camera, Conditioning, Grid, Rotary, WorldConfig, WorldModel

FRAMES, FRAME_TOKENS = 2, 9
TOKENS = FRAMES * FRAME_TOKENS
LAYERS, HEADS = 2, 3


def tiny_backbone() -> SmallWorld:
    """Two layers of three heads, 18 tokens a chunk."""
    config = WorldConfig(
        width=36,
        layers=LAYERS,
        heads=HEADS,
        expansion=2,
        camera=Camera(size=6),
        grid=Grid(patch=2, rows=3, columns=3, frames=FRAMES),
        rotary=Rotary(pairs=(2, 2, 2)),
    )
    torch.manual_seed(1)
    model = WorldModel(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=1.2 * parameter.shape[-1] ** -0.5)
    return SmallWorld(model.requires_grad_(False).eval())


def chunk(number: int, batch: int = 2, start: int | None = None) -> tuple[torch.Tensor, Conditioning]:
    """Clean frames and conditioning of one chunk, a function of its number."""
    generator = torch.Generator().manual_seed(100 + number)
    first = number * FRAMES if start is None else start
    conditioning = Conditioning(
        torch.randint(5, (batch, FRAMES), generator=generator),
        torch.randn(batch, FRAMES, 3, generator=generator),
        torch.arange(first, first + FRAMES, dtype=torch.float32).expand(batch, FRAMES),
    )
    return torch.rand(batch, FRAMES, 3, 6, 6, generator=generator) * 2 - 1, conditioning


def rollout(
    policy: Policy, observed: int = 4, generated: int = 2, reindex: Reindex | None = None, batch: int = 2
) -> tuple[PrunedSession, list[torch.Tensor]]:
    """A session that observed some chunks and generated more, and what it generated."""
    session = PrunedSession(tiny_backbone(), policy, batch=batch, reindex=reindex, seed=3)
    for number in range(observed):
        session.observe(*chunk(number, batch))
    numbers = range(observed, observed + generated)
    return session, [session.generate(chunk(number, batch)[1]).final for number in numbers]
