"""Random numbers by name: a hash of (seed, stream, index), the same on every device and in every batch.

A scene or a walk is a function of its seed alone, whatever is generated beside it, in what order and where.
The hash is two rounds of multiply and shift on 32 bits (Wellons' "lowbias32"), nested over its three inputs.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

_MASK = 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    x = x & _MASK
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK  # int64 wraps, its low 32 bits stay right
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def uniform(seeds: Tensor, stream: int, count: int) -> Tensor:
    """Numbers in [0, 1), float32 [N, count], from seeds int64 [N].

    Parameters
    ----------
    stream
        Names the use: two uses of one seed take two streams.
    """
    index = torch.arange(count, dtype=torch.int64, device=seeds.device)
    key = _mix(seeds ^ _mix(torch.full_like(seeds, stream) + 0x51ED27))
    bits = _mix(key[:, None] ^ _mix(index + 0x2545F4))
    return (bits >> 8).float() * 2.0**-24


def choice(seeds: Tensor, stream: int, count: int, options: int) -> Tensor:
    """Whole numbers below `options`, int64 [N, count]."""
    return (uniform(seeds, stream, count) * options).long().clamp_(max=options - 1)


def permutation(seeds: Tensor, stream: int, options: int) -> Tensor:
    """The numbers below `options` in a random order, int64 [N, options]."""
    return uniform(seeds, stream, options).argsort(dim=1)
