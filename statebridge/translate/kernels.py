"""Triton kernels of fused.py, which says what they compute. Imported where CUDA is, and only there.

A program takes `BLOCK_T` tokens of one head, all channels of them, and steps through the columns of the weight.
Names as in fused.py: x `[T, D]`, W `[D, E]`, B and U `[D, R]`; HALF is half of the rotary channels, 0 for none.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _partner(columns, HALF: tl.constexpr):
    """Channel that each rotary channel is paired with; the others are their own."""
    return tl.where(columns < HALF, columns + HALF, tl.where(columns < 2 * HALF, columns - HALF, columns))


@triton.jit
def _turn(x, partner, cos, sin, rows, columns, mask, HALF: tl.constexpr):
    """Rotate the rotary channels `x` [T, 2 HALF]; `partner` holds what each is paired with."""
    place = rows[:, None] * (2 * HALF) + columns[None, :]
    c = tl.load(cos + place, mask=mask, other=1.0)
    s = tl.load(sin + place, mask=mask, other=0.0)
    sign = tl.where(columns < HALF, -1.0, 1.0)[None, :]
    return (x.to(tl.float32) * c + (sign * partner.to(tl.float32)) * s).to(tl.bfloat16)


@triton.jit
def _product(x, turned, high, low, bias, columns, D: tl.constexpr, E: tl.constexpr, HALF: tl.constexpr):
    """x W + b of some columns, float32; the rotary channels of x are 0 there and come as `turned`."""
    place = tl.arange(0, D)[:, None] * E + columns[None, :]
    y = tl.dot(x, tl.load(low + place))
    y = tl.dot(x, tl.load(high + place), y)
    if HALF > 0:
        place = tl.arange(0, 2 * HALF)[:, None] * E + columns[None, :]
        y = tl.dot(turned, tl.load(low + place), y)
        y = tl.dot(turned, tl.load(high + place), y)
    return y + tl.load(bias + columns)[None, :]


@triton.jit
def turned_affine(
    x_in, y_out, high, low, bias, cos_in, sin_in, cos_out, sin_out, tokens, heads,
    D: tl.constexpr, E: tl.constexpr, HALF_IN: tl.constexpr, HALF_OUT: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head, row = tl.program_id(1) % heads, tl.program_id(1) // heads
    inside = (token < tokens)[:, None]
    angles = row.to(tl.int64) * tokens + token  # cos and sin are of rows, not of heads
    place = tl.program_id(1).to(tl.int64) * tokens + token
    x_in += place[:, None] * D
    y_out += place[:, None] * E
    channel = tl.arange(0, D)[None, :]
    x = tl.load(x_in + channel, mask=inside & (channel >= 2 * HALF_IN), other=0.0)  # [T, D]
    turned = x
    if HALF_IN > 0:
        rotary = tl.arange(0, 2 * HALF_IN)
        own = tl.load(x_in + rotary[None, :], mask=inside, other=0.0)
        paired = tl.load(x_in + _partner(rotary, HALF_IN)[None, :], mask=inside, other=0.0)
        turned = _turn(own, paired, cos_in, sin_in, angles, rotary, inside, HALF_IN)
    high += head * D * E
    low += head * D * E
    bias += head * E
    first = 0
    if HALF_OUT > 0:
        # the rotary columns are the first step; their partners are computed as columns of their own
        column = tl.arange(0, COLUMNS)
        y = _product(x, turned, high, low, bias, column, D, E, HALF_IN).to(tl.bfloat16)
        p = _product(x, turned, high, low, bias, _partner(column, HALF_OUT), D, E, HALF_IN).to(tl.bfloat16)
        rotated = _turn(y, p, cos_out, sin_out, angles, column, inside, HALF_OUT)
        tl.store(y_out + column[None, :], rotated, mask=inside)
        first = COLUMNS
    for start in range(first, E, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        y = _product(x, turned, high, low, bias, column, D, E, HALF_IN).to(tl.bfloat16)
        tl.store(y_out + column[None, :], y, mask=inside)


@triton.jit
def _split(x):
    """`x` float32 as a sum of two bfloat16 tensors."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def low_rank(
    x_in, y_out, basis, update, rows, R: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = (row < rows)[:, None]
    x_in += row[:, None] * D
    y_out += row[:, None] * D
    channel, rank = tl.arange(0, D), tl.arange(0, WIDE)
    held = rank < R
    x = tl.load(x_in + channel[None, :], mask=inside, other=0.0)  # [T, D]
    b, b_low = _split(tl.load(basis + channel[:, None] * R + rank[None, :], mask=held[None, :], other=0.0))
    z, z_low = _split(tl.dot(x, b, tl.dot(x, b_low)))  # [T, R]
    for start in range(0, D, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        transposed = column[None, :] * R + rank[:, None]  # [R, columns]
        u, u_low = _split(tl.load(update + transposed, mask=held[:, None], other=0.0))
        residual = tl.dot(z, u_low)
        residual = tl.dot(z_low, u, residual)
        residual = tl.dot(z, u, residual)
        part = tl.load(x_in + column[None, :], mask=inside, other=0.0).to(tl.float32)
        # x - (0 - r) and not x + r, because -0.0 + 0.0 is 0.0, another bit pattern
        y = part - (0.0 - residual)
        tl.store(y_out + column[None, :], y.to(tl.bfloat16), mask=inside)
