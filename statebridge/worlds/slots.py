"""Slots of a history: raw keys and values with the coordinates, chunk and frame that each row of memory came from.

A slot is a row of memory and not a position. Keys are kept un-rotated and are rotated when they are read, so that
gathering, moving in time and rotating commute exactly. Rows of a batch may keep different numbers of slots; then the
shorter ones are padded at the front, and padding takes no part in attention.

Knows tensors; which slots to keep is decided elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

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


def rotated(slots: Slots, rotary: Rotary, coordinates: Tensor | None) -> RotatedSlots:
    cos, sin = rotary.angles(slots.coordinates if coordinates is None else coordinates)
    keys = tuple(rotate(key, cos, sin) for key in slots.keys)
    return RotatedSlots(slots.heads, keys, slots.values, slots.valid if slots.padded else None)
