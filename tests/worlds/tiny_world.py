"""A world model small enough for tests, whose every part matters: large random weights, nothing at its identity."""

from __future__ import annotations

import torch

from statebridge.worlds import Camera, Conditioning, Grid, Rotary, WorldConfig, WorldModel

CONFIG = WorldConfig(
    width=64,
    layers=3,
    heads=2,
    camera=Camera(size=16),
    grid=Grid(patch=4, rows=4, columns=4, frames=2),
    rotary=Rotary(pairs=(6, 4, 6)),
)
F, TOKENS = CONFIG.grid.frames, CONFIG.grid.chunk_tokens


def tiny_model(seed: int = 0) -> WorldModel:
    """A model with weights of its seed."""
    g = torch.Generator().manual_seed(seed)
    model = WorldModel(CONFIG)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15, generator=g)
    return model.requires_grad_(False).eval()


def conditioning(batch: int, chunks: int, seed: int = 1) -> Conditioning:
    """Poses and fractional times that differ between rows."""
    g = torch.Generator().manual_seed(seed)
    frames = chunks * F
    return Conditioning(
        torch.randint(0, 5, (batch, frames), generator=g),
        torch.randn(batch, frames, 3, generator=g),
        torch.rand(batch, frames, generator=g).cumsum(1) * 3,
    )


def frames(batch: int, chunks: int, seed: int = 2) -> torch.Tensor:
    """Random frames."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(batch, chunks * F, 3, 16, 16, generator=g) * 2 - 1
