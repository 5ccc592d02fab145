"""Convolution history: one affine map per head's block of channels, shared by the W taps.

    c_r[block, w] ~ c_s[block, w] W_block + b_block

The channels of a layer are its packed projections, Q | K | V, and a block is one head's share of them.
Blocks may differ in size (Q and K heads against V heads); equal sizes are fitted and applied together.
A row of the regression is one tap of one state. This module does not know which block is which head's,
beyond the layout it is handed. Ridge: see ridge.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from statebridge.errors import FitError
from statebridge.translate.base import Translator, require_axes, take
from statebridge.translate.moments import Moments
from statebridge.translate.ridge import DEFAULT_ALPHAS, AffineRidge


@dataclass(frozen=True)
class BlockLayout:
    """How the channels of a convolution history fall into blocks.

    Parameters
    ----------
    blocks
        (start, size) of each block; together they cover channels 0..C-1 once, in any order.
    """

    blocks: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        expected = 0
        for start, size in sorted(self.blocks):
            if start != expected or size < 1:
                raise FitError(
                    f"Channel blocks must cover every channel once; the block (start {start}, size {size}) "
                    f"should start at {expected} and hold at least one channel. Correct the layout."
                )
            expected = start + size

    @classmethod
    def of_heads(cls, *parts: tuple[int, int]) -> Self:
        """Lay out consecutive (heads, width) parts, for example Q, K and V."""
        sizes = [width for heads, width in parts for _ in range(heads)]
        return cls(tuple((sum(sizes[:i]), size) for i, size in enumerate(sizes)))

    @property
    def channels(self) -> int:
        """Number of channels C."""
        return sum(size for _, size in self.blocks)

    @functools.cached_property
    def even(self) -> bool:
        """Whether all blocks are of one size and in order, so that a view finds them."""
        size = self.blocks[0][1]
        return self.blocks == tuple((i * size, size) for i in range(len(self.blocks)))

    def buckets(self) -> dict[int, list[int]]:
        """Return the indices of the blocks of each size, in order."""
        sizes = sorted({size for _, size in self.blocks})
        return {size: [i for i, block in enumerate(self.blocks) if block[1] == size] for size in sizes}

    def index(self, size: int, device: torch.device | str = "cpu") -> Tensor:
        """Return the channels of all blocks of one size, `[G, size]`, int64."""
        return _index(self.blocks, size, torch.device(device))


class BlockMoments:
    """Mutable accumulator of paired convolution histories: one `Moments` per block size.

    Parameters
    ----------
    layout
        The blocks; the same for source and receiver.
    device
        Where the accumulators live.
    """

    def __init__(self, layout: BlockLayout, device: torch.device | str = "cpu") -> None:
        self.layout = layout
        self.buckets = {
            size: Moments([_name(layout, i) for i in members], size, size, device)
            for size, members in layout.buckets().items()
        }

    def update(self, source: Tensor, receiver: Tensor) -> BlockMoments:
        """Fold in the histories of the same states, `[B, C, W]` of both models.

        Raises
        ------
        FitError
            If shapes do not fit the layout, or a block holds NaN or infinity.
        """
        if source.shape != receiver.shape or source.ndim != 3 or source.shape[1] != self.layout.channels:
            raise FitError(
                f"Convolution histories must be [B, {self.layout.channels}, W] in both models, found "
                f"{list(source.shape)} and {list(receiver.shape)}. Copy this component, or correct the layout."
            )
        for size, moments in self.buckets.items():
            index = self.layout.index(size, source.device)
            moments.update(*(x[:, index].permute(1, 0, 3, 2).flatten(1, 2) for x in (source, receiver)))
        return self

    def merge(self, other: BlockMoments) -> BlockMoments:
        """Fold in the moments of other states; returns self."""
        if self.layout != other.layout:
            raise FitError("Moments of different channel layouts cannot be merged. Merge equal layers only.")
        for size, moments in self.buckets.items():
            moments.merge(other.buckets[size])
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return all accumulators as named tensors (not copies), prefixed by their block size."""
        return {
            f"{size}.{name}": tensor
            for size, moments in self.buckets.items()
            for name, tensor in moments.state_dict().items()
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor], layout: BlockLayout) -> BlockMoments:
        """Rebuild an accumulator that goes on where `state_dict` left off; its tensors are copied."""
        moments = cls(layout)
        for size, empty in moments.buckets.items():
            prefix = f"{size}."
            part = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
            moments.buckets[size] = Moments.from_state_dict(part, empty.names)
        return moments


@dataclass(frozen=True, eq=False)
class BlockAffine(Translator):
    """Affine map of the convolution history of one layer.

    Parameters
    ----------
    layout
        The blocks of the channels.
    weights, biases
        Per block size (ascending): `[G, S, S]` and `[G, S]`, float32, G in the order of the layout.
    """

    layout: BlockLayout
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    def apply(self, x: Tensor) -> Tensor:
        """Map `x` `[B, C, W]`, in float32, returned in the dtype of `x`.

        Raises
        ------
        StateMismatch
            If the number of channels is not that of the layout.
        """
        axes = {"B": None, "C": self.layout.channels, "W": None}
        require_axes("the convolution map does not fit", x, axes)
        if self.layout.even:
            return self._mapped(x.reshape(len(x), *self.biases[0].shape, -1), 0).flatten(1, 2)
        y = torch.empty_like(x)
        for bucket, size in enumerate(self.layout.buckets()):
            index = self.layout.index(size, x.device)
            y[:, index] = self._mapped(x[:, index], bucket)
        return y

    def _mapped(self, blocks: Tensor, bucket: int) -> Tensor:
        """Map the blocks `[B, G, S, W]` of one size."""
        mapped = torch.einsum("bgsw,gst->bgtw", blocks.float(), self.weights[bucket])  # [B, G, S, W]
        return (mapped + self.biases[bucket][..., None]).to(blocks.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Return `blocks` `[n, 2]` int64, and `weight.S`, `bias.S` for each block size S."""
        named = {"blocks": torch.tensor(self.layout.blocks, dtype=torch.int64)}
        for size, weight, bias in zip(self.layout.buckets(), self.weights, self.biases, strict=True):
            named |= {f"weight.{size}": weight, f"bias.{size}": bias}
        return named

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Rebuild the map from what `tensors` returned."""
        (blocks,) = take(tensors, ("blocks",), cls)
        layout = BlockLayout(tuple((start, size) for start, size in blocks.tolist()))
        weights = take(tensors, (f"weight.{size}" for size in layout.buckets()), cls)
        biases = take(tensors, (f"bias.{size}" for size in layout.buckets()), cls)
        return cls(layout, tuple(weights), tuple(biases))

    @classmethod
    def joined(cls, maps: Sequence[Self]) -> Self:
        """One map for the channels of all."""
        starts = itertools.accumulate((m.layout.channels for m in maps), initial=0)
        blocks = [
            (first + start, size)
            for first, m in zip(starts, maps, strict=False)
            for start, size in m.layout.blocks
        ]
        weights, biases = (
            tuple(torch.cat(parts) for parts in zip(*(getattr(m, name) for m in maps), strict=True))
            for name in ("weights", "biases")
        )
        return cls(BlockLayout(tuple(blocks)), weights, biases)


class BlockRidge:
    """Affine ridge per block of channels, alpha chosen per block on validation moments.

    Parameters
    ----------
    alphas, relative
        As in AffineRidge.

    Attributes
    ----------
    map_ : BlockAffine
        The fitted map, float32.
    choice_, alpha_, validation_error_, copy_error_ : Tensor [blocks]
        As in AffineRidge, in the order of the layout.
    path_error_ : Tensor [len(alphas), blocks]
    """

    def __init__(self, alphas: Sequence[float] = DEFAULT_ALPHAS, relative: bool = True) -> None:
        self.alphas = alphas
        self.relative = relative

    def fit(self, train: BlockMoments, validation: BlockMoments) -> BlockRidge:
        """Fit on the training moments and choose alpha on the validation moments; see AffineRidge.fit."""
        if train.layout != validation.layout:
            raise FitError(
                "Training and validation moments have different channel layouts. Use the same one."
            )
        fits = [
            AffineRidge(self.alphas, self.relative).fit(moments, validation.buckets[size])
            for size, moments in train.buckets.items()
        ]
        order = torch.tensor([i for members in train.layout.buckets().values() for i in members]).argsort()
        self.map_ = BlockAffine(
            train.layout,
            tuple(fit.weight_.float() for fit in fits),
            tuple(fit.bias_.float() for fit in fits),
        )
        self.choice_ = torch.cat([fit.choice_ for fit in fits])[order]
        self.alpha_ = torch.cat([fit.alpha_ for fit in fits])[order]
        self.path_error_ = torch.cat([fit.path_error_ for fit in fits], dim=1)[:, order]
        self.validation_error_ = torch.cat([fit.validation_error_ for fit in fits])[order]
        # blocks are square, so a copy always exists
        self.copy_error_ = torch.cat([e for fit in fits if (e := fit.copy_error_) is not None])[order]
        return self


@functools.lru_cache(maxsize=64)
def _index(blocks: tuple[tuple[int, int], ...], size: int, device: torch.device) -> Tensor:
    """Kept on the device: moving it there would wait for the device every time."""
    channels = [range(start, start + n) for start, n in blocks if n == size]
    with torch.inference_mode(False):  # a tensor of inference mode could not index where gradients pass
        return torch.tensor(channels, dtype=torch.int64, device=device)


def _name(layout: BlockLayout, i: int) -> str:
    start, size = layout.blocks[i]
    return f"channels {start}..{start + size - 1}"
