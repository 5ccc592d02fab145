"""What every pruning policy has in common: what is protected, and how scores become a mask.

A policy is a dataclass with one hook, `score`: a number per token, larger means keep. Scores are made when a
chunk is clean; the mask is made from them when the chunk leaves the window. Either a fixed threshold decides
(score > threshold, as published), or a budget: the best `keep_ratio` of each chunk, the same number of tokens
in every row, so that policies can be compared at equal budgets.

Knows tokens of a chunk, no caches and no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from statebridge.errors import PruneError


@dataclass(frozen=True, eq=False)
class ChunkRecord:
    """What a policy may look at when a chunk is clean.

    Attributes
    ----------
    chunk
        Its id.
    final
        Token values of the clean chunk, [B, N, d], frame after frame.
    probe
        Token values of x̂0 at the probe step, [B, N, d]; None unless the policy asks for them.
    previous
        Token values of the last frame before the chunk, [B, tokens of a frame, d]; None for the first chunk.
    frame_tokens
        Tokens of a frame.
    generator
        Random numbers that depend on the session's seed and the chunk alone.
    """

    chunk: int
    final: Tensor
    probe: Tensor | None
    previous: Tensor | None
    frame_tokens: int
    generator: torch.Generator


@dataclass(frozen=True)
class Policy:
    """What is kept of each chunk that leaves the window.

    Parameters
    ----------
    sink
        First chunks of the session that are never pruned.
    window
        Latest chunks that are not pruned yet.

    Raises
    ------
    PruneError
        When the window is smaller than a chunk, or the sink negative.
    """

    sink: int = 1
    window: int = 2

    name: ClassVar[str]
    #: Whether `score` reads the probe.
    probes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.window < 1:
            raise PruneError(
                f"A window of {self.window} chunks is smaller than a chunk, and the newest chunk has no score "
                "against anything later yet; give a window of at least 1."
            )
        if self.sink < 0:
            raise PruneError(f"A sink of {self.sink} chunks does not exist; give 0 or more.")

    def first_heads(self, layers: int, heads: int) -> tuple[tuple[int, ...], ...] | None:
        """Return the heads of the first of two head groups, layer by layer; None for one group of all heads."""
        return None

    def score(self, record: ChunkRecord) -> Tensor:
        """Return a number per token, float32 [B, N]; larger means keep."""
        raise NotImplementedError

    def keep(self, scores: Tensor) -> Sequence[Tensor | None]:
        """Return the mask [B, N] of each head group from stored scores; None keeps everything."""
        raise NotImplementedError


@dataclass(frozen=True)
class ScoredPolicy(Policy):
    """A policy whose scores decide, by a threshold or by a budget.

    Parameters
    ----------
    threshold
        Keep a token when its score is larger.
    keep_ratio
        Keep this share of each chunk, the best scores first, earlier tokens first among equals.

    Raises
    ------
    PruneError
        Unless exactly one of the two is given, and the ratio lies between 0 and 1.
    """

    threshold: float | None = None
    keep_ratio: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.threshold is None) == (self.keep_ratio is None):
            raise PruneError(f"{self.name} needs either a threshold or a keep_ratio, and not both.")
        if self.keep_ratio is not None and not 0 <= self.keep_ratio <= 1:
            raise PruneError(f"A keep_ratio of {self.keep_ratio} is no share; give a number from 0 to 1.")
        if self.threshold is not None and self.threshold != self.threshold:
            raise PruneError("A threshold that is not a number compares with nothing.")

    def keep(self, scores: Tensor) -> Sequence[Tensor | None]:
        """Return one mask for all heads."""
        return (self.mask(scores),)

    def mask(self, scores: Tensor) -> Tensor:
        """Return bool [B, N] of the tokens to keep."""
        if self.threshold is not None:
            return scores > self.threshold
        assert self.budget is not None
        return best(scores, self.budget)

    @property
    def budget(self) -> float | None:
        """Share of a chunk that a head keeps, where a budget decides."""
        return self.keep_ratio


def best(scores: Tensor, ratio: float) -> Tensor:
    """Return bool [B, N] of the best `ratio` of each row, ⌊ratio · N + ½⌋ tokens."""
    count = int(ratio * scores.shape[1] + 0.5)
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, order, True)
