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
    """Rotate `x` [T, D], float32; `partner` holds the paired channels, `rows` the first of cos and sin."""
    rotary = mask & (columns < 2 * HALF)[None, :]
    place = rows[:, None] * (2 * HALF) + columns[None, :]
    c = tl.load(cos + place, mask=rotary, other=1.0)
    s = tl.load(sin + place, mask=rotary, other=0.0)
    sign = tl.where(columns < HALF, -1.0, 1.0)[None, :]
    return x * c + (sign * partner) * s


@triton.jit
def _product(x, high, low, bias, place, columns):
    """x W + b of some columns, float32."""
    y = tl.dot(x, tl.load(low + place))
    y = tl.dot(x, tl.load(high + place), y)
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
    channel = tl.arange(0, D)
    x = tl.load(x_in + place[:, None] * D + channel[None, :], mask=inside, other=0.0)  # [T, D]
    if HALF_IN > 0:
        paired = tl.load(
            x_in + place[:, None] * D + _partner(channel, HALF_IN)[None, :], mask=inside, other=0.0
        )
        turned = _turn(
            x.to(tl.float32), paired.to(tl.float32), cos_in, sin_in, angles, channel, inside, HALF_IN
        )
        x = turned.to(tl.bfloat16)
    high += head * D * E
    low += head * D * E
    bias += head * E
    first = 0
    if HALF_OUT > 0:
        # the rotary columns are the first step; their partners are computed as columns of their own
        column = tl.arange(0, COLUMNS)
        other = _partner(column, HALF_OUT)
        y = _product(x, high, low, bias, channel[:, None] * E + column[None, :], column).to(tl.bfloat16)
        p = _product(x, high, low, bias, channel[:, None] * E + other[None, :], other).to(tl.bfloat16)
        y = _turn(y.to(tl.float32), p.to(tl.float32), cos_out, sin_out, angles, column, inside, HALF_OUT)
        tl.store(y_out + place[:, None] * E + column[None, :], y.to(tl.bfloat16), mask=inside)
        first = COLUMNS
    for start in range(first, E, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        y = _product(x, high, low, bias, channel[:, None] * E + column[None, :], column)
        tl.store(y_out + place[:, None] * E + column[None, :], y.to(tl.bfloat16), mask=inside)


@triton.jit
def _split(x):
    """`x` float32 as a sum of two bfloat16 tensors."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def low_rank(
    x_in, y_out, basis, update, rows, R: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = (row < rows)[:, None]
    channel, rank = tl.arange(0, D), tl.arange(0, WIDE)
    place = row[:, None] * D + channel[None, :]
    held = (rank < R)[None, :]
    x = tl.load(x_in + place, mask=inside, other=0.0)  # [T, D]
    b, b_low = _split(tl.load(basis + channel[:, None] * R + rank[None, :], mask=held, other=0.0))
    u, u_low = _split(tl.load(update + channel[:, None] * R + rank[None, :], mask=held, other=0.0))
    z, z_low = _split(tl.dot(x, b, tl.dot(x, b_low)))  # [T, R]
    residual = tl.dot(z, tl.trans(u_low))
    residual = tl.dot(z_low, tl.trans(u), residual)
    residual = tl.dot(z, tl.trans(u), residual)  # [T, D]
    # x - (0 - r) and not x + r, because -0.0 + 0.0 is 0.0, another bit pattern
    y = x.to(tl.float32) - (0.0 - residual)
    tl.store(y_out + place, y.to(tl.bfloat16), mask=inside)
