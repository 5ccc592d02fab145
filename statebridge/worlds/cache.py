"""The history of a world: raw keys and values of clean chunks, with coordinates, and a clock that is no length.

Keys are kept un-rotated with their coordinates (t, h, w) and are rotated when they are read, so gathering,
moving in time and rotating commute exactly. A slot is a row of memory and not a position: removing slots moves
nothing, and the next chunk's number and time come from the clock, never from a count of slots. Heads may be
split into groups that remember different slots. A cache is a value: every change gives a new one, and forks
share memory that nobody writes to.

Knows tensors; which slots to keep is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from statebridge.errors import StateMismatch
from statebridge.worlds.rotary import Rotary, rotate

Tensor = torch.Tensor


@dataclass(frozen=True)
class ChunkKV:
    """Raw keys and values that one clean pass wrote.

    Attributes
    ----------
    keys, values
        Per layer [B, H, T, D], keys un-rotated.
    coordinates
        (t, h, w) of each token, float32 [B, T, 3].
    frames
        Number of the frame that each token belongs to, counted from the session's start, int64 [T].
    number
        Number of the chunk, counted from the session's start.
    next_time
        Time of the frame that follows this chunk.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    coordinates: Tensor
    frames: Tensor
    number: int
    next_time: float


@dataclass(frozen=True)
class Slots:
    """What one group of heads remembers; the same slots in all layers.

    Attributes
    ----------
    heads
        Per layer, the heads of this group.
    keys, values
        Per layer [B, heads of this layer, S, D], keys un-rotated.
    coordinates
        (t, h, w), float32 [B, S, 3].
    chunks, frames
        Numbers of the chunk and of the frame that a slot came from, int64 [B, S]; -1 where a slot is padding.
    padded
        Whether any row has padding: rows of a batch may keep different numbers of slots.
    """

    heads: tuple[tuple[int, ...], ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    coordinates: Tensor
    chunks: Tensor
    frames: Tensor
    padded: bool = False

    @property
    def slots(self) -> int:
        """Slots S, padding included."""
        return self.chunks.shape[1]

    @property
    def valid(self) -> Tensor:
        """Where a slot holds a token, bool [B, S]."""
        return self.chunks >= 0

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    def append(self, chunk: ChunkKV) -> Slots:
        """These slots followed by those of a chunk."""
        B, T = chunk.coordinates.shape[:2]
        pick = [self._of(layer, chunk.keys[layer].shape[1]) for layer in range(len(self.heads))]
        number = torch.full((B, T), chunk.number, dtype=torch.int64, device=self.chunks.device)
        return replace(
            self,
            keys=tuple(
                torch.cat([a, b[:, h]], 2) for a, b, h in zip(self.keys, chunk.keys, pick, strict=True)
            ),
            values=tuple(
                torch.cat([a, b[:, h]], 2) for a, b, h in zip(self.values, chunk.values, pick, strict=True)
            ),
            coordinates=torch.cat([self.coordinates, chunk.coordinates], 1),
            chunks=torch.cat([self.chunks, number], 1),
            frames=torch.cat([self.frames, chunk.frames.expand(B, T)], 1),
        )

    def gather(self, keep: Tensor) -> Slots:
        """The slots that are kept, physically: tensors shrink, order stays.

        Parameters
        ----------
        keep
            Bool [S] for all rows, or [B, S]; rows with fewer kept slots are padded at the front.
        """
        keep = (keep if keep.ndim == 2 else keep.expand(self.chunks.shape)) & self.valid
        counts = keep.sum(1)
        width = int(counts.max()) if keep.numel() else 0
        # a stable sort puts what is dropped first and leaves the order of what is kept as it is
        order = (
            keep.to(torch.uint8).sort(dim=1, stable=True).indices[:, keep.shape[1] - width :]
        )  # [B, width]
        filled = keep.gather(1, order)
        by_slot = order[:, None, :, None]

        def take(x: Tensor) -> Tensor:
            rows = x.gather(2, by_slot.expand(-1, x.shape[1], -1, x.shape[3]))
            return rows * filled[:, None, :, None].to(rows.dtype) if padded else rows

        padded = bool((counts < width).any())
        return replace(
            self,
            keys=tuple(take(x) for x in self.keys),
            values=tuple(take(x) for x in self.values),
            coordinates=self.coordinates.gather(1, order[..., None].expand(-1, -1, 3)),
            chunks=self.chunks.gather(1, order).masked_fill(~filled, -1),
            frames=self.frames.gather(1, order).masked_fill(~filled, -1),
            padded=padded,
        )

    def _of(self, layer: int, heads: int) -> slice | list[int]:
        mine = self.heads[layer]
        return slice(None) if mine == tuple(range(heads)) else list(mine)


@dataclass(frozen=True)
class RotatedSlots:
    """Slots that are ready for attention.

    Attributes
    ----------
    heads
        Per layer, the heads of this group.
    keys, values
        Per layer [B, heads of this layer, S, D], keys rotated.
    valid
        Bool [B, S] where rows have padding, else None.
    """

    heads: tuple[tuple[int, ...], ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    valid: Tensor | None


#: What the denoiser attends to: one entry a head group.
History = tuple[RotatedSlots, ...]


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
        return tuple(_rotated(group, rotary, where) for group, where in zip(self.groups, moved, strict=True))


def _rotated(slots: Slots, rotary: Rotary, coordinates: Tensor | None) -> RotatedSlots:
    cos, sin = rotary.angles(slots.coordinates if coordinates is None else coordinates)
    keys = tuple(rotate(key, cos, sin) for key in slots.keys)
    return RotatedSlots(slots.heads, keys, slots.values, slots.valid if slots.padded else None)
