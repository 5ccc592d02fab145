"""Which launch settings serve the kernels of statebridge/translate/fused.py best on a GPU.

    python -m benchmarks.full_size_tune

One line per setting: milliseconds for keys (un-rotated, mapped, rotated), for values (mapped), and for a low-rank
residual, at the sizes of one layer of Qwen3.5 4B and 9B, beside a plain copy. The best go into `fused.LAUNCH`.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from statebridge.calibrate import LowRank
from statebridge.state import RopeSpec, Rotation
from statebridge.translate import HeadAffine, fused


def milliseconds(function: Any, repeats: int = 20) -> float:
    """Mean device time of a call, after one that compiles."""
    function()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / repeats


def main() -> None:
    """Print every setting that this GPU can launch."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(4, 256, 256, generator=generator) / 16
    mapped = HeadAffine(weight, torch.randn(4, 256, generator=generator)).to("cuda")
    residual = LowRank.identity((4, 256), 4, generator).cuda().requires_grad_(False)
    rope = RopeSpec(tuple(1e7 ** (-i / 32) for i in range(32)))
    for length in (4096, 65536):
        x = torch.randn(1, 4, length, 256, dtype=torch.bfloat16, device="cuda")
        after = Rotation.of(torch.arange(length)[None], rope, x.device)
        before = after.inverse
        naive = milliseconds(lambda: mapped.turned_naive(x, before, after))  # noqa: B023
        print(
            f"{length} tokens: copy {milliseconds(x.clone):.4f} ms, step by step {naive:.4f} ms", flush=True
        )
        for block, warps in itertools.product((64, 128), (4, 8)):
            launch = {"BLOCK_T": block, "num_warps": warps}
            calls = (
                lambda: fused.turned_affine(x, mapped.halves, mapped.bias, before, after, **launch),  # noqa: B023
                lambda: fused.turned_affine(x, mapped.halves, mapped.bias, None, None, **launch),  # noqa: B023
                lambda: fused.low_rank(x, residual.basis, residual.update, **launch),  # noqa: B023
            )
            found = []
            for call in calls:
                try:
                    found.append(f"{milliseconds(call):.4f}")
                except Exception as error:  # a setting that this GPU has no shared memory for
                    found.append(type(error).__name__)
            print(f"  {launch}: keys {found[0]}, values {found[1]}, low rank {found[2]}", flush=True)


if __name__ == "__main__":
    main()
