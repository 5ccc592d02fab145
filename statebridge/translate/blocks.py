"""Paired recurrent states that are visited several times, block by block.

The bilinear fit cannot work from moments (they would be (K V)^2 per head), so it goes through the states
again for every half step. They come from a callable, which lets the caller keep them memory-mapped; a
block is as many states as should be in memory, in float64, at once. This module does not know where the
blocks live. Means and spreads are merged across blocks as in moments.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from statebridge.errors import FitError

Blocks = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""Each call returns a fresh iterator over pairs `[n, H, K_s, V_s]`, `[n, H, K_r, V_r]` of the same
states, both on the device that the fit is to run on."""


@dataclass(frozen=True, eq=False)
class PairedMeans:
    """Elementwise means of both models' matrices, and the receiver's summed squares around its mean `[H]`."""

    count: int
    source: Tensor
    receiver: Tensor
    spread: Tensor

    @classmethod
    def of(cls, blocks: Blocks, role: str) -> Self:
        count, means, spread = 0, [torch.zeros(()), torch.zeros(())], torch.zeros(())
        for pair in blocks():
            n = len(pair[0])
            for states, side in zip(pair, ("source", "receiver"), strict=True):
                _require_states(states, n, role, side)
            if n == 0:
                continue
            block = [states.to(torch.float64).mean(0) for states in pair]  # [H, K, V]
            means = [mean.to(new.device) for mean, new in zip(means, block, strict=True)]
            steps = [new - mean for new, mean in zip(block, means, strict=True)]
            own = (pair[1].to(torch.float64) - block[1]).square().sum((0, 2, 3))
            between = steps[1].square().sum((1, 2)) * (count * n / (count + n))
            spread = spread.to(own.device) + own + between
            count += n
            means = [mean + step * (n / count) for mean, step in zip(means, steps, strict=True)]
        if count < 2:
            raise FitError(f"A bilinear map needs at least two {role} states, found {count}. Add documents.")
        return cls(count, means[0], means[1], spread)


def _require_states(states: Tensor, n: int, role: str, side: str) -> None:
    if states.ndim != 4 or len(states) != n:
        raise FitError(
            f"Recurrent states must come in pairs of [n, H, K, V] with equal n; a {role} block of the {side} "
            f"is {list(states.shape)}, n is {n}. Pair the same documents of both models."
        )
    bad = ~torch.isfinite(states).transpose(0, 1).flatten(1).all(1)  # [H]
    if bad.any():
        raise FitError(
            f"The {role} states of the {side} hold NaN or infinity in head {int(bad.nonzero()[0])}. "
            "Leave out the document they come from."
        )


def passes(blocks: Blocks, count: int, role: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through the blocks once more, and refuse if it is not the same number of states again."""
    seen = 0
    for source, receiver in blocks():
        seen += len(source)
        yield source, receiver
    if seen != count:
        raise FitError(
            f"A pass over the {role} states found {seen}, the first pass {count}. "
            "Let the callable return a fresh iterator over the same states each time."
        )


def centred(states: Tensor, mean: Tensor) -> Tensor:
    """Return the states in float64, less their mean."""
    return states.to(torch.float64) - mean
