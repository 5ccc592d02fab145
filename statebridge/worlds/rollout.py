"""Reading observed frames into a history, and going on from it, for a batch of worlds.

What is remembered between chunks is a function handed in, from one history to the next: a window, a policy of
pruning, or nothing at all. Knows the model and its history; no scenes and no sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from statebridge.worlds.cache import HistoryCache
from statebridge.worlds.conditioning import Conditioning
from statebridge.worlds.model import WorldModel
from statebridge.worlds.sampler import Sampler, write_chunk

Tensor = torch.Tensor
Remember = Callable[[HistoryCache], HistoryCache]


def everything(cache: HistoryCache) -> HistoryCache:
    """Remember all."""
    return cache


def last_chunks(count: int, sink: int = 0) -> Remember:
    """Remember the first `sink` chunks and the last `count`."""

    def remember(cache: HistoryCache) -> HistoryCache:
        recent = range(max(0, cache.next_chunk - count), cache.next_chunk)
        return cache.keep_chunks([*range(sink), *recent])

    return remember


@dataclass(frozen=True)
class Rollout:
    """What was generated, and the history after it.

    Attributes
    ----------
    frames
        float32 [B, chunks * F, 3, size, size] in [-1, 1].
    cache
        The history, these frames included.
    """

    frames: Tensor
    cache: HistoryCache


def observe(
    model: WorldModel,
    cache: HistoryCache,
    frames: Tensor,
    conditioning: Conditioning,
    remember: Remember = everything,
) -> HistoryCache:
    """Write observed frames [B, chunks * F, 3, size, size] into a history, chunk by chunk."""
    F = model.config.grid.frames
    for start in range(0, frames.shape[1], F):
        part = conditioning.frames(start, start + F)
        cache = remember(write_chunk(model, frames[:, start : start + F], part, cache))
    return cache


def generate(
    model: WorldModel,
    cache: HistoryCache,
    conditioning: Conditioning,
    generator: torch.Generator,
    sampler: Sampler | None = None,
    remember: Remember = everything,
) -> Rollout:
    """Make the frames that the conditioning describes, chunk by chunk."""
    F, made = model.config.grid.frames, []
    sampler = sampler or Sampler()
    for start in range(0, conditioning.actions.shape[1], F):
        part = conditioning.frames(start, start + F)
        clean = sampler.sample(model, part, cache.read(model.config.rotary), generator).final
        cache = remember(write_chunk(model, clean, part, cache))
        made.append(clean)
    return Rollout(torch.cat(made, dim=1), cache)


def reread(
    model: WorldModel, frames: Tensor, conditioning: Conditioning, numbers: Iterable[int]
) -> HistoryCache:
    """A history of clean chunks read again in the order given, each seeing those before it.

    Parameters
    ----------
    frames
        float32 [1, n * F, 3, size, size] of n chunks.
    numbers
        Number of each chunk; gaps are allowed.
    """
    cache, F = model.empty_cache(), model.config.grid.frames
    for index, number in enumerate(numbers):
        part = slice(index * F, index * F + F)
        ready = HistoryCache(cache.groups, number, float(conditioning.times[0, part.start]))
        cache = write_chunk(model, frames[:, part], conditioning.frames(part.start, part.stop), ready)
    return cache
