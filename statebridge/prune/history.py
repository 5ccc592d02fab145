"""One chunk less in a history, and what is left of it for attention to see.

The history itself is `statebridge.worlds.cache.HistoryCache`: raw or rotated keys, coordinates and chunk ids by
slot, head groups, a clock that is no length. Here a chunk is cut out of it by a mask per group, physically, and
the positions that remain visible are counted: the pruning ratio PR = 1 − Σ visible / Σ full, summed over the
chunks that were processed. A position counts once for each row, layer and head that sees it, in each chunk that
attends to it. PR counts positions: it is no share of bytes, no speed, and says nothing about quality.

Knows caches, no policies and no models.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from statebridge.errors import PruneError
from statebridge.worlds.cache import HistoryCache


def prune_chunk(cache: HistoryCache, number: int, keep: Sequence[Tensor | None]) -> HistoryCache:
    """Return the history with less of one chunk; the clock stays.

    Parameters
    ----------
    cache
        The history.
    number
        Number of a chunk that no row has lost a token of yet.
    keep
        For each head group a bool [B, N] over the chunk's N tokens, or None to keep all of them.

    Raises
    ------
    PruneError
        When a mask does not fit the chunk, or would leave a head group without any token in some row.
    """
    groups = []
    for slots, mask in zip(cache.groups, keep, strict=True):
        if mask is None:
            groups.append(slots)
            continue
        member = slots.chunks == number  # [B, S]
        held = member.sum(1).tolist()
        if set(held) != {mask.shape[1]}:
            raise PruneError(
                f"The mask over chunk {number} is for {mask.shape[1]} tokens, and the rows hold {held} of it; a "
                "chunk is pruned once, when it leaves the window."
            )
        kept = (~member & slots.valid).masked_scatter(member, mask)
        empty = (kept.sum(1) == 0).tolist()
        if any(empty):
            raise PruneError(
                f"The mask keeps nothing in row {empty.index(True)} and would empty its layers; protect a sink or a "
                "window of at least one chunk."
            )
        groups.append(slots.gather(kept))
    return dataclasses.replace(cache, groups=tuple(groups))


def visible_positions(cache: HistoryCache) -> int:
    """Return the history positions that attention sees, summed over rows, layers and heads."""
    total = 0
    for slots in cache.groups:
        tokens = int(slots.valid.sum()) if slots.padded else slots.chunks.numel()
        total += tokens * sum(len(heads) for heads in slots.heads)
    return total


@dataclass(frozen=True)
class Visible:
    """What one chunk saw.

    Attributes
    ----------
    chunk
        Its number.
    positions
        History positions visible to it, summed over rows, layers and heads.
    full
        The same without pruning.
    """

    chunk: int
    positions: int
    full: int


def pruning_ratio(seen: Iterable[Visible], first_chunk: int = 0) -> float:
    """Return PR over the chunks from `first_chunk` on; 0 where there was no history yet."""
    counted = [entry for entry in seen if entry.chunk >= first_chunk]
    full = sum(entry.full for entry in counted)
    return 1 - sum(entry.positions for entry in counted) / full if full else 0.0
