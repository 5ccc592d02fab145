"""Keys and values in one pass over memory, on CUDA: un-rotate, map, rotate; and the low-rank residual.

    y = rotate(unrotate(x) W + b)         turned_affine, naive twin `HeadAffine.turned_naive`
    y = x + (x B) Uᵀ                      low_rank, naive twin `LowRank` of the calibrate room

Written as separate tensor operations, each of these reads and writes the keys a dozen times, half of them in
float32. Here a block of tokens is read once and written once. x is bfloat16; W, B and U, float32, enter the matrix
units as sums of two bfloat16 numbers, sums are float32, and what the twin rounds to bfloat16 on the way is rounded
here too. Knows tensors only. Needs Triton, which comes with torch on CUDA; `available` says where these serve,
elsewhere the twins do.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from statebridge.state import Rotation

#: Tokens of a block, warps, and steps of loads in flight; where a block may have 196 kB of shared memory, more tokens
#: share each load of the weight.
LAUNCH = {"BLOCK_T": 64, "num_warps": 4, "num_stages": 2}
WIDE_LAUNCH = {"BLOCK_T": 128, "num_warps": 8, "num_stages": 2}
_COLUMNS = 64  # columns of W that a step takes where there is no rotation
#: Largest rank of `low_rank`, and the narrowest matrix that the matrix units take.
RANK = 16


def available(x: Tensor, *widths: int) -> bool:
    """Whether keys or values `x` [B, H, T, D], and other widths beside D, are what the kernels take here."""
    powers = all(width >= 16 and width & (width - 1) == 0 for width in (x.shape[-1], *widths))
    return (
        x.is_cuda
        and x.dtype == torch.bfloat16
        and powers
        and _shared_memory(x.device) >= _needed(x.shape[-1], LAUNCH)
    )


def _needed(width: int, launch: dict[str, int]) -> int:
    """Bytes of shared memory: a block of x, and the steps of both halves of W."""
    return 2 * width * (launch["BLOCK_T"] + launch["num_stages"] * 2 * _COLUMNS)


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a block may have; 0 where there are no kernels or no bfloat16 matrix units."""
    if importlib.util.find_spec("triton") is None or torch.cuda.get_device_capability(device) < (8, 0):
        return 0
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def turned_affine(
    x: Tensor,
    halves: tuple[Tensor, Tensor],
    bias: Tensor,
    before: Rotation | None,
    after: Rotation | None,
    **launch: int,
) -> Tensor:
    """Map keys or values, rotated by `before` on the way in and by `after` on the way out.

    Parameters
    ----------
    x
        `[B, H, T, D]`, bfloat16.
    halves
        The weight `[H, D, E]` as a sum of two bfloat16 tensors.
    bias
        `[H, E]`, float32.
    before, after
        Rotations of the rows' positions, or none.
    **launch
        Other settings than `LAUNCH` or `WIDE_LAUNCH`, to measure them.

    Returns
    -------
    Tensor
        `[B, H, T, E]`, bfloat16. It differs from the naive twin's by rounding: at most one step of bfloat16 for each
        of the roundings on the way.
    """
    from statebridge.translate import kernels

    x = x.contiguous()
    rows, heads, tokens, _ = x.shape
    width, out = halves[0].shape[1:]
    y = x.new_empty(rows, heads, tokens, out)
    wide = _shared_memory(x.device) >= _needed(x.shape[-1], WIDE_LAUNCH)
    settings: dict[str, Any] = (WIDE_LAUNCH if wide else LAUNCH) | launch
    trig = [r for rotation in (before, after) for r in _trig(rotation, x)]
    half_in, half_out = (0 if r is None else r.cos.shape[-1] // 2 for r in (before, after))
    kernels.turned_affine[(-(-tokens // settings["BLOCK_T"]), rows * heads)](
        x, y, *halves, bias, *trig, tokens, heads,
        D=width, E=out, HALF_IN=half_in, HALF_OUT=half_out, COLUMNS=2 * half_out or min(_COLUMNS, out), **settings,
    )  # fmt: skip
    return y


def low_rank(x: Tensor, basis: Tensor, update: Tensor, **launch: int) -> Tensor:
    """Keys or values `x` `[…, D]`, bfloat16, moved by (x B) Uᵀ, with B and U `[D, R]`, R up to 16, float32.

    Within one step of bfloat16 of the naive twin; bit for bit `x` where the residual is 0.
    """
    from statebridge.translate import kernels

    x = x.contiguous()
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    y = torch.empty_like(x)
    settings: dict[str, Any] = LAUNCH | launch
    kernels.low_rank[(-(-rows // settings["BLOCK_T"]),)](
        x, y, basis.contiguous(), update.contiguous(), rows, R=basis.shape[1], D=width, WIDE=RANK, **settings
    )  # fmt: skip
    return y


def _trig(rotation: Rotation | None, x: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin as rows of rotary channels; `x` stands in for those of no rotation, which are never read."""
    return (x, x) if rotation is None else (rotation.cos.contiguous(), rotation.sin.contiguous())
