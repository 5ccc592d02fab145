"""The history of a world: raw keys and values of clean chunks, and a clock that is no length.

Removing slots moves nothing: the next chunk's number and time come from the clock, never from a count of slots.
Heads may be split into groups that remember different slots. A cache is a value: every change gives a new one, and
forks share memory that nobody writes to.

Knows tensors; which slots to keep is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from statebridge.errors import StateMismatch
from statebridge.worlds.rotary import Rotary
from statebridge.worlds.slots import ChunkKV, History, RotatedSlots, Slots, rotated

__all__ = ["ChunkKV", "History", "HistoryCache", "RotatedSlots", "Slots"]

Tensor = torch.Tensor


@dataclass(frozen=True)
class HistoryCache:
    """Everything that the denoiser remembers of clean chunks.

    Attributes
    ----------
    groups
        Slots of each head group; together the groups hold every head of every layer once.
    next_chunk
        Number of the chunk that comes next.
    next_time
        Time of the frame that comes next.
    """

    groups: tuple[Slots, ...]
    next_chunk: int = 0
    next_time: float = 0.0

    @classmethod
    def empty(
        cls,
        layers: int,
        heads: int,
        head_dim: int,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> HistoryCache:
        """A history of nothing, with the clock at zero."""

        def nothing() -> tuple[Tensor, ...]:
            shape = (batch, heads, 0, head_dim)
            return tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(layers))

        numbers = torch.empty(batch, 0, dtype=torch.int64, device=device)
        coordinates = torch.empty(batch, 0, 3, device=device)
        every = (tuple(range(heads)),) * layers
        return cls((Slots(every, nothing(), nothing(), coordinates, numbers, numbers),))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values over all groups."""
        return sum(group.nbytes for group in self.groups)

    def append(self, chunk: ChunkKV) -> HistoryCache:
        """This history followed by a chunk; the clock moves to what follows it.

        Raises
        ------
        StateMismatch
            When the chunk is not the one that the clock expects.
        """
        if chunk.number != self.next_chunk:
            raise StateMismatch(
                "the chunk does not follow this history",
                {"chunk number": (self.next_chunk, chunk.number)},
                "Append chunks in the order in which they were made.",
            )
        groups = tuple(group.append(chunk) for group in self.groups)
        return HistoryCache(groups, chunk.number + 1, chunk.next_time)

    def gather(self, keep: Tensor, group: int | None = None) -> HistoryCache:
        """The history with the kept slots of one head group, or of all groups; the clock stays.

        Parameters
        ----------
        keep
            Bool [S] or [B, S] over the slots of the group.
        group
            Index of the group; None applies one mask to every group.
        """
        groups = tuple(
            slots.gather(keep) if group in (None, index) else slots for index, slots in enumerate(self.groups)
        )
        return replace(self, groups=groups)

    def keep_chunks(self, numbers: Sequence[int]) -> HistoryCache:
        """The history with the slots of these chunks only."""
        groups = []
        for slots in self.groups:
            wanted = torch.tensor(list(numbers), dtype=torch.int64, device=slots.chunks.device)
            groups.append(slots.gather(torch.isin(slots.chunks, wanted)))
        return replace(self, groups=tuple(groups))

    def split(self, first: Sequence[Sequence[int]]) -> HistoryCache:
        """The history with its single group split in two.

        Parameters
        ----------
        first
            Per layer, the heads of the first group; all others form the second. A group without heads in some
            layer is allowed.

        Raises
        ------
        StateMismatch
            When the history is split already.
        """
        if len(self.groups) != 1:
            raise StateMismatch(
                "a history can be split once", {"head groups": (1, len(self.groups))}, "Split the whole one."
            )
        whole = self.groups[0]
        chosen = [tuple(sorted(heads)) for heads in first]
        others = [
            tuple(h for h in heads if h not in mine) for heads, mine in zip(whole.heads, chosen, strict=True)
        ]
        groups = tuple(
            replace(
                whole,
                heads=tuple(part),
                keys=tuple(k[:, list(heads)] for k, heads in zip(whole.keys, part, strict=True)),
                values=tuple(v[:, list(heads)] for v, heads in zip(whole.values, part, strict=True)),
            )
            for part in (chosen, others)
        )
        return replace(self, groups=groups)

    def read(self, rotary: Rotary, coordinates: Sequence[Tensor | None] | None = None) -> History:
        """Rotate every key to its coordinates, or to other ones, for attention.

        Parameters
        ----------
        coordinates
            Per group, coordinates [B, S, 3] to use instead of the slots' own; None keeps those. This is where
            re-indexing in time acts: keys' phases change and nothing else.
        """
        moved = coordinates if coordinates is not None else (None,) * len(self.groups)
        return tuple(rotated(group, rotary, where) for group, where in zip(self.groups, moved, strict=True))
