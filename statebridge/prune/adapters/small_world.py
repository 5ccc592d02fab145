"""The small world's denoiser, pruned.

It keeps raw keys with coordinates (t, patch row, azimuth) and rotates them when it reads them, so nothing has to
be undone. The condition of a chunk is its `Conditioning`: actions, camera poses and times.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from statebridge.errors import PruneError
from statebridge.prune.attention import chosen_mass
from statebridge.prune.backbone import Clock, Geometry, Raggedness
from statebridge.prune.rotary import Rotation
from statebridge.worlds.cache import ChunkKV, History, HistoryCache
from statebridge.worlds.conditioning import Conditioning
from statebridge.worlds.model import WorldModel, attend_history
from statebridge.worlds.rotary import rotate
from statebridge.worlds.sampler import Sampler, Trajectory, draw_noise, encode_chunk, predict_at


class SmallWorld:
    """A `WorldModel` as a backbone; chunks are frames [B, F, 3, size, size] in [-1, 1].

    Parameters
    ----------
    model
        The denoiser.
    sampler
        Its schedule; deterministic steps by default.
    """

    raggedness = Raggedness.HEAD_GROUPS
    rotation = Rotation.RAW

    def __init__(self, model: WorldModel, sampler: Sampler | None = None) -> None:
        self.model, self.sampler = model, sampler or Sampler()
        c = model.config
        self.schedule = self.sampler.sigmas
        self.geometry = Geometry(c.layers, c.heads, c.rotary.head_dim, c.grid.frame_tokens)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    def empty_cache(self, batch: int) -> HistoryCache:
        """Return a history of nothing."""
        return self.model.empty_cache(batch)

    def read(self, cache: HistoryCache, coordinates: Sequence[Tensor | None] | None) -> History:
        """Rotate the keys of each group."""
        return cache.read(self.model.config.rotary, coordinates)

    def sample(
        self, history: History, clock: Clock, condition: Conditioning, generator: torch.Generator
    ) -> Trajectory:
        """Sample the frames that the conditioning describes."""
        _require_time(clock, condition)
        return self.sampler.sample(self.model, condition, history, generator)

    def probe(
        self,
        history: History,
        clock: Clock,
        clean: Tensor,
        step: int,
        condition: Conditioning,
        generator: torch.Generator,
    ) -> Tensor:
        """Noise observed frames to a step and predict them again."""
        _require_time(clock, condition)
        noise = draw_noise(self.model, condition, generator)
        return predict_at(self.model, clean, self.schedule[step], condition, history, noise)

    def write(self, history: History, clock: Clock, clean: Tensor, condition: Conditioning) -> ChunkKV:
        """Read clean frames at noise 0."""
        _require_time(clock, condition)
        return encode_chunk(self.model, clean, condition, history, clock.chunk)

    def tokens(self, x: Tensor) -> Tensor:
        """Return the patches [B, N, 3 · 8 · 8] of a chunk."""
        return self.model.config.grid.patchify(x)

    def attention_mass(
        self, history: History, clock: Clock, clean: Tensor, condition: Conditioning, chosen: Tensor
    ) -> Tensor:
        """Return the attention [layers, heads] of a clean pass on the chosen slots."""
        _require_time(clock, condition)
        model, c = self.model, self.model.config
        cos, sin = c.rotary.angles(condition.coordinates(c.camera, c.grid))
        mass: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer, query, key = len(mass), rotate(q, cos, sin), rotate(k, cos, sin)
            mass.append(chosen_mass(layer, query, key, history, chosen))
            return attend_history(layer, query, key, v, history)

        x = model.embed(c.grid.patchify(clean), condition)[:, None]  # [B, 1, N, d]
        modulation, _ = model.modulate(torch.zeros(len(clean), 1, device=clean.device))
        for block in model.blocks:
            x = block(x, modulation, attend)
        return torch.stack(mass)


def _require_time(clock: Clock, condition: Conditioning) -> None:
    """Refuse a chunk whose times are not those that come next: a slot count in the place of a clock."""
    begins = float(condition.times[0, 0])
    if begins != clock.frame:
        raise PruneError(
            f"The chunk is conditioned on frame {begins:g}, and the session's clock is at {clock.frame:g}; number "
            "times from the start of the session, whatever has been pruned."
        )
