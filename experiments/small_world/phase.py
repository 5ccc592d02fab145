"""One phase of a training run: what a step draws, its loss, and the error on held-out worlds.

    x_σ = (1 - σ) x0 + σ noise,     error of a chunk = mean over its values of (x0 - model(x_σ, σ, context))²

All that is drawn is a function of the seed and the step's number. Knows batches, tables and the model; no optimiser.
"""

from __future__ import annotations

import math

import torch

from experiments.small_world.config import Phase, TrainConfig
from experiments.small_world.data import HELD_OUT, Batch, Batches
from experiments.small_world.doubled import Attention, predict, structure, thinned
from statebridge.worlds import WorldModel
from statebridge.worlds.draws import uniform
from statebridge.worlds.sampler import SCHEDULE

Tensor = torch.Tensor


class PhaseRun:
    """One phase's batches, attention buffers and loss, compiled on a GPU."""

    def __init__(self, config: TrainConfig, phase: Phase, model: WorldModel, first_seed: int) -> None:
        self.config, self.phase, self.model = config, phase, model
        grid, device = config.model.grid, model.device
        self.tokens = grid.chunk_tokens
        self.cuda = device.type == "cuda"
        self.batches = Batches(config, phase, first_seed, device)
        self.held_out = Batches(config, phase, HELD_OUT, device)
        block = 128 if self.cuda else self.tokens
        pairs = sum(config.model.rotary.pairs)
        self.attention = Attention(phase.sequences, phase.chunks, self.tokens, pairs, device, block)

    def loss(self, step: int) -> Tensor:
        """The loss of a training step."""
        batch, c = self.batches.step(step), self.config
        B, N = self.phase.sequences, self.phase.chunks
        number = step * B + torch.arange(B, device=self.model.device) + self.batches.first_seed
        u, v = uniform(number, 500, N), uniform(number, 501, N)
        schedule = torch.tensor(SCHEDULE, device=u.device)
        drawn = schedule[(v * len(SCHEDULE)).long().clamp_(max=len(SCHEDULE) - 1)]
        sigma = torch.where(u < c.schedule_share, drawn, 0.02 + 0.97 * v)
        generator = torch.Generator(u.device).manual_seed(c.seed * 1_000_003 + step)
        rough = c.context_noise * uniform(number, 502, N) * (uniform(number, 503, 1) < 0.5)
        return self._error(batch, sigma, generator, thinned(number, N, self.tokens), rough).mean()

    def validate(self) -> dict[str, float]:
        """Held-out error by noise level, with all history and with none, of sequences that nothing thins."""
        batch = self.held_out.step(0)
        B, N = self.phase.sequences, self.phase.chunks
        level = torch.tensor(SCHEDULE, device=self.model.device).repeat(B, math.ceil(N / 4))[:, :N]
        whole = structure(N, self.tokens, self.model.device)
        own = (
            torch.arange(2 * N, device=whole.device)[:, None] == torch.arange(2 * N, device=whole.device)
        ).repeat_interleave(self.tokens, dim=1)
        result = {}
        for name, table in (("history", whole), ("none", whole & own)):
            generator = torch.Generator(level.device).manual_seed(7)
            error = self._error(
                batch, level, generator, table.expand(B, -1, -1), torch.zeros_like(level)
            ).detach()
            late = error[:, N // 2 :]
            for sigma in SCHEDULE:
                picked = late[level[:, N // 2 :] == sigma]
                result[f"{name}_{sigma}"] = float(picked.mean())
        return result

    def _error(
        self, batch: Batch, sigma: Tensor, generator: torch.Generator, allowed: Tensor, rough: Tensor
    ) -> Tensor:
        """Squared error of each chunk, float32 [B, N]."""
        grid = self.config.model.grid
        clean = grid.patchify(batch.frames).unflatten(1, (self.phase.chunks, self.tokens))
        noise, other = (torch.randn(clean.shape, generator=generator, device=clean.device) for _ in range(2))
        noisy = (1 - sigma[..., None, None]) * clean + sigma[..., None, None] * noise
        context = (1 - rough[..., None, None]) * clean + rough[..., None, None] * other
        coordinates = batch.conditioning.coordinates(self.config.model.camera, grid)
        self.attention.set(allowed, *self.config.model.rotary.angles(coordinates))
        attend = self.attention.flex if self.cuda else self.attention.dense
        with torch.autocast(clean.device.type, torch.bfloat16, enabled=self.cuda):
            x0 = predict(self.model, context, noisy, sigma, batch.conditioning, attend)
        return (x0 - clean).square().mean(dim=(-1, -2))
