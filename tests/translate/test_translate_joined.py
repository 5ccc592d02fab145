"""Maps joined over layers, blocks found by a view, and the CUDA kernels: each against the plain way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from statebridge.calibrate import LowRank
from statebridge.state import RopeSpec, Rotation
from statebridge.translate import BlockAffine, BlockLayout, HeadAffine, HeadBilinear, Translator, fused

UNEVEN = BlockLayout.of_heads((2, 6), (3, 4))
EVEN = BlockLayout.of_heads((2, 5), (1, 5))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def blocks(layout: BlockLayout, seed: int) -> BlockAffine:
    sizes = {size: len(members) for size, members in layout.buckets().items()}
    return BlockAffine(
        layout,
        tuple(randn(n, size, size, seed=seed + size) for size, n in sizes.items()),
        tuple(randn(n, size, seed=seed - size) for size, n in sizes.items()),
    )


def heads(seed: int) -> HeadAffine:
    return HeadAffine(randn(3, 5, 7, seed=seed), randn(3, 7, seed=-seed))


def bilinear(seed: int) -> HeadBilinear:
    means = randn(3, 5, 4, seed=seed + 2), randn(3, 6, 8, seed=seed + 3)
    return HeadBilinear(randn(3, 6, 5, seed=seed), randn(3, 8, 4, seed=seed + 1), *means)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("maps", "shape"),
    [
        ([heads(10), heads(20), heads(30)], (3, 9, 5)),
        ([bilinear(10), bilinear(20), bilinear(30)], (3, 5, 4)),
        ([blocks(UNEVEN, 10), blocks(UNEVEN, 20), blocks(UNEVEN, 30)], (24, 4)),
        ([blocks(EVEN, 10), blocks(EVEN, 20), blocks(EVEN, 30)], (15, 4)),
    ],
    ids=["heads", "bilinear", "uneven blocks", "even blocks"],
)
def test_a_joined_map_is_its_maps_one_after_the_other(
    maps: list[Translator], shape: tuple[int, ...], rows: int
) -> None:
    """To float32 rounding: a batched product may sum in another order."""
    parts = [randn(rows, *shape, seed=i) for i in range(len(maps))]
    together = type(maps[0]).joined(maps).apply(torch.cat(parts, dim=1))
    apart = torch.cat([m.apply(x) for m, x in zip(maps, parts, strict=True)], dim=1)
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)


def test_blocks_by_a_view_are_blocks_by_their_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-exact: the same products of the same numbers."""
    mapped, x = blocks(EVEN, 3), randn(2, 15, 4).bfloat16()
    viewed = mapped.apply(x)
    monkeypatch.setattr(BlockLayout, "even", False)
    assert torch.equal(viewed, mapped.apply(x))


def test_blocks_out_of_order_are_not_even() -> None:
    assert EVEN.even
    assert not UNEVEN.even
    assert not BlockLayout(((5, 5), (0, 5), (10, 5))).even


def test_the_halves_of_a_weight_hold_it() -> None:
    """To 2^-16: two bfloat16 numbers have 8 bits each."""
    weight = heads(1).weight
    high, low = heads(1).halves
    assert ((high.float() + low.float() - weight).abs() <= 2.0**-16 * weight.abs()).all()
    assert ((high.float() - weight).abs() > 2.0**-16 * weight.abs()).any()


def test_on_a_cpu_nothing_goes_through_the_kernels() -> None:
    assert not fused.available(randn(1, 2, 8, 64).bfloat16())


def rotation(positions: Tensor, channels: int, base: float, scaling: float = 1.0) -> Rotation:
    frequencies = tuple(base ** (-i / (channels // 2)) for i in range(channels // 2))
    return Rotation.of(positions, RopeSpec(frequencies, scaling), positions.device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on CUDA")
@pytest.mark.parametrize(
    ("width", "out", "rotary"), [(256, 256, 64), (64, 64, 0), (128, 64, 32), (32, 32, 32)]
)
def test_one_pass_over_keys_is_the_steps(width: int, out: int, rotary: int) -> None:
    """Two roundings to bfloat16, 2^-8 relative each, of numbers that the rotation adds to each other."""
    x = randn(2, 3, 333, width).bfloat16().cuda()
    mapped = HeadAffine(randn(3, width, out) * width**-0.5, randn(3, out)).to("cuda")
    positions = (torch.arange(333).repeat(2, 1) + torch.tensor([[0], [41]])).cuda()
    before = rotation(positions, rotary, 1e7).inverse if rotary else None
    after = rotation(positions, rotary, 5e4, 1.3) if rotary else None
    assert fused.available(x, out, *([rotary] * 2 if rotary else []))
    expected = mapped.turned_naive(x, before, after).float()
    difference = (mapped.turned(x, before, after).float() - expected).abs()
    assert (difference <= 2.0**-7 * expected.abs() + 0.02).all()
    # nearly all values are equal: a wrong pairing or position would move most of them
    assert (difference > 0).float().mean() < 0.05


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on CUDA")
def test_the_low_rank_kernel_is_the_residual() -> None:
    """One rounding to bfloat16; and nothing moves, to the last bit, where the update is 0."""
    x = randn(2, 3, 333, 256).bfloat16().cuda()
    residual = LowRank(torch.linalg.qr(randn(256, 4))[0], randn(256, 4) * 0.1).cuda()
    with torch.no_grad():
        expected = residual(x).float()
    difference = (fused.low_rank(x, residual.basis, residual.update.detach()).float() - expected).abs()
    # a value next to the middle of two bfloat16 numbers may fall to either, one step is at most 2^-7 of it; and a sum
    # that cancels keeps the error of its parts
    assert (difference <= 2.0**-7 * expected.abs() + 2e-5).all()
    assert (difference > 0).float().mean() < 0.01
    still = fused.low_rank(x, residual.basis, torch.zeros(256, 4, device="cuda"))
    assert torch.equal(still.view(torch.int16), x.view(torch.int16))
