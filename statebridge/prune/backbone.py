"""What a video model must offer to be pruned; an adapter is a class that offers it.

A pass over a chunk reads the history as `read` prepared it: keys rotated once, whatever the number of passes.
Times are absolute frames of the session and come from the clock, never from the length of the cache. Keys of
noisy passes are dropped; only what `write` returns, from the clean pass, enters the history.

Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from statebridge.prune.rotary import Rotation
from statebridge.worlds.cache import ChunkKV, History, HistoryCache
from statebridge.worlds.sampler import Trajectory


class Raggedness(StrEnum):
    """How unequal the kept tokens of heads may be; rows of a batch may always differ."""

    NONE = "none"  # all heads keep the same tokens
    HEAD_GROUPS = "head groups"  # two groups of heads may keep different tokens


class Clock(NamedTuple):
    """Number and first frame of the chunk in work; neither is a length."""

    chunk: int
    frame: float


@dataclass(frozen=True)
class Geometry:
    """Sizes of a backbone.

    Attributes
    ----------
    layers, heads, head_dim
        Attention layers, heads of each, channels of a head.
    frame_tokens
        Tokens of a frame.
    """

    layers: int
    heads: int
    head_dim: int
    frame_tokens: int


class Backbone(Protocol):
    """A chunk-causal video diffusion model. `condition` is its own affair: actions and poses, or a text.

    Attributes
    ----------
    geometry
        Its sizes.
    schedule
        Noise levels of its sampling steps, falling.
    rotation
        State of the keys that `write` returns.
    raggedness
        What its attention allows.
    """

    @property
    def geometry(self) -> Geometry: ...
    @property
    def schedule(self) -> tuple[float, ...]: ...
    @property
    def rotation(self) -> Rotation: ...
    @property
    def raggedness(self) -> Raggedness: ...
    @property
    def device(self) -> torch.device: ...

    def empty_cache(self, batch: int) -> HistoryCache:
        """Return a history of nothing, with the clock at zero."""

    def read(self, cache: HistoryCache, coordinates: Sequence[Tensor | None] | None) -> History:
        """Rotate the keys of each group to their own coordinates, or to others [B, S, 3] of any real time."""

    def sample(
        self, history: History, clock: Clock, condition: Any, generator: torch.Generator
    ) -> Trajectory:
        """Sample a chunk; one model call a step, every x̂0 kept, the last one being the result."""

    def probe(
        self,
        history: History,
        clock: Clock,
        clean: Tensor,
        step: int,
        condition: Any,
        generator: torch.Generator,
    ) -> Tensor:
        """Noise an observed clean chunk to a step of the schedule and return x̂0; one model call."""

    def write(self, history: History, clock: Clock, clean: Tensor, condition: Any) -> ChunkKV:
        """Return keys, values and coordinates of a clean chunk, from one pass at noise 0."""

    def tokens(self, x: Tensor) -> Tensor:
        """Return the values [B, N, d] of a chunk's tokens, frame after frame, in the order of its keys."""

    def attention_mass(
        self, history: History, clock: Clock, clean: Tensor, condition: Any, chosen: Tensor
    ) -> Tensor:
        """Return the attention [layers, heads] that a clean chunk puts on the chosen slots, bool [B, S]."""
