"""What every translator and its estimator must do, one matrix over all three kinds.

Geometry is asymmetric everywhere (K != V, heads, tokens and taps all different, ragged blocks), so that a
swapped axis cannot pass; the planted maps are far from symmetric for the same reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import translate_naive as naive
from safetensors.torch import load, save
from torch import Tensor

from statebridge.errors import FitError, StateFileError, StateMismatch
from statebridge.translate import (
    BilinearRidge,
    BlockAffine,
    BlockLayout,
    BlockMoments,
    BlockRidge,
    HeadAffine,
    HeadBilinear,
    KeyValueRidge,
    Translator,
    head_moments,
    head_rows,
)

LAYOUT = BlockLayout.of_heads((2, 3), (2, 3), (3, 5))  # Q | K | V: 4 blocks of 3 channels, 3 of 5


@dataclass(frozen=True)
class Case:
    """One kind of translator: source data, a planted map, and how to fit and check it."""

    shape: tuple[int, ...]  # of one state
    kind: type[Translator]
    plant: Callable[[Tensor], Tensor]
    fit: Callable[..., Any]  # (pieces of (source, receiver), validation pair, alphas) -> fitted estimator
    oracle: Callable[[Tensor, Tensor, float, Tensor], np.ndarray]  # source, receiver, relative alpha, x
    bad_group: str  # what an error calls the last group

    def source(self, states: int, seed: int) -> Tensor:
        noise = torch.randn(states, *self.shape, generator=_seeded(seed), dtype=torch.float64)
        scale = torch.linspace(0.5, 2.0, self.shape[-1], dtype=torch.float64)
        return noise * scale + 3.0  # a mean that is large against the spread

    def pair(self, states: int, seed: int, noise: float = 0.0) -> tuple[Tensor, Tensor]:
        x = self.source(states, seed)
        y = self.plant(x)
        return x, y + noise * torch.randn(y.shape, generator=_seeded(seed + 1), dtype=y.dtype)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _matrix(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=_seeded(seed), dtype=torch.float64)


def _fit_keyvalue(pieces, validation, alphas):
    def moments(pairs):
        (x, y), *_ = pairs
        total = head_moments(x.shape[1], x.shape[3], y.shape[3])
        for x, y in pairs:
            total.merge(head_moments(x.shape[1], x.shape[3], y.shape[3]).update(head_rows(x), head_rows(y)))
        return total

    return KeyValueRidge(alphas).fit(moments(pieces), moments([validation]))


def _fit_blocks(pieces, validation, alphas):
    def moments(pairs):
        total = BlockMoments(LAYOUT)
        for pair in pairs:
            total.merge(BlockMoments(LAYOUT).update(*pair))
        return total

    return BlockRidge(alphas).fit(moments(pieces), moments([validation]))


def _fit_bilinear(pieces, validation, alphas):
    return BilinearRidge(alphas, n_iter=40, tol=1e-14).fit(lambda: iter(pieces), lambda: iter([validation]))


def _plant_keyvalue(x: Tensor) -> Tensor:
    return torch.einsum("bhtd,hde->bhte", x, _matrix(3, 4, 4, seed=1)) + _matrix(3, 1, 4, seed=2)


def _plant_blocks(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    for i, (start, size) in enumerate(LAYOUT.blocks):
        weight = _matrix(size, size, seed=10 + i)
        for w in range(x.shape[2]):
            y[:, start : start + size, w] = x[:, start : start + size, w] @ weight + i
    return y


def _plant_bilinear(x: Tensor) -> Tensor:
    # near the identity, as between siblings: the alternation starts there
    left = torch.eye(5, 3, dtype=torch.float64) + 0.3 * _matrix(2, 5, 3, seed=3)
    right = torch.eye(4, 4, dtype=torch.float64) + 0.3 * _matrix(2, 4, 4, seed=4)
    return left @ x @ right.mT + _matrix(2, 5, 4, seed=5)


def _oracle_keyvalue(x: Tensor, y: Tensor, alpha: float, new: Tensor) -> np.ndarray:
    out = np.zeros(new.shape)
    for h in range(x.shape[1]):
        rows = x[:, h].flatten(0, 1)
        absolute = alpha * float((rows - rows.mean(0)).square().sum()) / rows.shape[1]
        weight, bias = naive.affine_heads(x[:, h : h + 1], y[:, h : h + 1], absolute)
        out[:, h] = new[:, h].numpy() @ weight[0] + bias[0]
    return out


def _oracle_blocks(x: Tensor, y: Tensor, alpha: float, new: Tensor) -> np.ndarray:
    out = np.zeros(new.shape)
    for start, size in LAYOUT.blocks:
        part = slice(start, start + size)
        rows = x[:, part].transpose(1, 2).flatten(0, 1)
        absolute = alpha * float((rows - rows.mean(0)).square().sum()) / size
        out[:, part] = naive.affine_blocks(x[:, part], y[:, part], ((0, size),), absolute, new[:, part])
    return out


def _oracle_bilinear(x: Tensor, y: Tensor, alpha: float, new: Tensor) -> np.ndarray:
    return naive.bilinear_heads(x, y, alpha, 40, new)


CASES = {
    "keyvalue": Case((3, 7, 4), HeadAffine, _plant_keyvalue, _fit_keyvalue, _oracle_keyvalue, "head 2"),
    "recurrent": Case((2, 3, 4), HeadBilinear, _plant_bilinear, _fit_bilinear, _oracle_bilinear, "head 1"),
    "convolution": Case(
        (LAYOUT.channels, 4), BlockAffine, _plant_blocks, _fit_blocks, _oracle_blocks, "channels 22..26"
    ),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_recovers_a_planted_map(case: Case) -> None:
    """Noiseless data of the map's own form: float32 rounding of values near 10 is all that may be left."""
    fitted = case.fit([case.pair(40, 0)], case.pair(30, 100), (1e-14, 1.0))
    x, y = case.pair(5, 200)
    torch.testing.assert_close(fitted.map_.apply(x.float()).double(), y, rtol=0, atol=1e-4)
    assert (fitted.validation_error_ < 1e-5).all()
    assert (fitted.choice_ == 0).all()


@pytest.mark.parametrize("alpha", [1e-3, 0.3])
def test_equals_the_naive_fit(case: Case, alpha: float) -> None:
    """scikit-learn in loops; the difference is one float32 application of the map."""
    x, y = case.pair(20, 0, noise=0.5)
    fitted = case.fit([(x[:3], y[:3]), (x[3:], y[3:])], (x, y), (alpha,))
    new = case.source(4, 300)
    expected = case.oracle(x, y, alpha, new)
    np.testing.assert_allclose(fitted.map_.apply(new.float()).numpy(), expected, rtol=0, atol=2e-5)


def test_validation_error_is_that_of_the_rows(case: Case) -> None:
    """The error from moments is the one that applying the map gives; float32 rounding of the map apart."""
    train, (x, y) = case.pair(20, 0, noise=0.5), case.pair(15, 50, noise=0.5)
    fitted = case.fit([train], (x, y), (1e-3, 1e-2, 0.1, 1.0))
    residual = (fitted.map_.apply(x.float()).double() - y).square()
    if case.kind is HeadBilinear:
        groups = [residual[:, h].sum() / (y - y.mean(0))[:, h].square().sum() for h in range(y.shape[1])]
    elif case.kind is HeadAffine:
        centred = y - y.mean((0, 2), keepdim=True)
        groups = [residual[:, h].sum() / centred[:, h].square().sum() for h in range(y.shape[1])]
    else:
        centred = y - y.mean((0, 2), keepdim=True)
        parts = [slice(start, start + size) for start, size in LAYOUT.blocks]
        groups = [residual[:, part].sum() / centred[:, part].square().sum() for part in parts]
    torch.testing.assert_close(fitted.validation_error_, torch.stack(groups).sqrt(), rtol=1e-5, atol=0)
    assert (fitted.path_error_.amin(0) == fitted.validation_error_).all()


def test_batching_and_sharding_do_not_matter(case: Case) -> None:
    """One batch, or ragged shards in another order: equal to float64 rounding, hence to 1e-6 in float32."""
    x, y = case.pair(24, 0, noise=0.5)
    validation = case.pair(10, 50, noise=0.5)
    whole = case.fit([(x, y)], validation, (1e-3, 0.1))
    shards = [(x[i:j], y[i:j]) for i, j in ((17, 24), (0, 1), (1, 9), (9, 17))]
    parts = case.fit(shards, validation, (1e-3, 0.1))
    assert torch.equal(whole.choice_, parts.choice_)
    for name, tensor in whole.map_.tensors().items():
        torch.testing.assert_close(tensor, parts.map_.tensors()[name], rtol=1e-5, atol=1e-6)


def test_recovers_the_identity(case: Case) -> None:
    """Source and receiver equal, regularisation towards 0: the map is a copy to float32 rounding."""
    x = case.source(40, 0)
    fitted = case.fit([(x, x)], (x, x), (1e-13,))
    new = case.source(3, 9)
    torch.testing.assert_close(fitted.map_.apply(new.float()).double(), new, rtol=0, atol=2e-5)
    assert (fitted.copy_error_ < 1e-7).all()
    if isinstance(fitted.map_, HeadBilinear):  # the scale between A and B is fixed so that both are I
        torch.testing.assert_close(fitted.map_.left, torch.eye(3).expand(2, 3, 3), rtol=0, atol=1e-5)
        torch.testing.assert_close(fitted.map_.right, torch.eye(4).expand(2, 4, 4), rtol=0, atol=1e-5)


def test_copy_error_is_that_of_the_rows(case: Case) -> None:
    """How far a plain copy is, per group, relative to the receiver's spread."""
    x = case.source(12, 0)
    y = x + 0.3 * _matrix(*x.shape, seed=8) + 0.2
    fitted = case.fit([(x, y)], (x, y), (0.1,))
    if case.kind is BlockAffine:
        start, size = LAYOUT.blocks[-1]
        x, y, last = x[:, start : start + size], y[:, start : start + size], fitted.copy_error_[-1]
        spread = y - y.mean((0, 2), keepdim=True)
    else:
        x, y, last = x[:, -1], y[:, -1], fitted.copy_error_[-1]
        spread = y - (y.mean(0) if case.kind is HeadBilinear else y.mean((0, 1)))
    torch.testing.assert_close(last, (x - y).norm() / spread.norm(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_computes_in_float32_and_keeps_the_dtype(case: Case, dtype: torch.dtype) -> None:
    """Bit-exact: the float32 answer, rounded once to the dtype that came in."""
    fitted = case.fit([case.pair(20, 0)], case.pair(20, 5), (1e-4,))
    x = case.source(3, 9).to(dtype)
    out = fitted.map_.apply(x)
    assert out.dtype == dtype
    assert torch.equal(out, fitted.map_.apply(x.float()).to(dtype))
    assert all(t.dtype in (torch.float32, torch.int64) for t in fitted.map_.tensors().values())


def test_rows_of_a_batch_are_independent(case: Case) -> None:
    """Row i of a batch is row i alone, to float32 rounding (a matmul may block a longer batch differently)."""
    fitted = case.fit([case.pair(20, 0)], case.pair(20, 5), (1e-4,))
    x = case.source(5, 9).float()
    out = fitted.map_.apply(x)
    for i in range(5):
        torch.testing.assert_close(out[i], fitted.map_.apply(x[i : i + 1])[0], rtol=1e-5, atol=1e-5)
    x[3] = torch.nan  # one row's fault is that row's alone
    assert torch.isfinite(fitted.map_.apply(x)[[0, 1, 2, 4]]).all()


def test_input_is_left_alone_and_gradients_pass(case: Case) -> None:
    fitted = case.fit([case.pair(20, 0)], case.pair(20, 5), (1e-4,))
    x = case.source(2, 9).float()
    before = x.clone()
    x.requires_grad_()
    out = fitted.map_.apply(x)
    assert torch.equal(x, before)
    assert out.data_ptr() != x.data_ptr()
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    assert (grad != 0).all()


def test_serialises(case: Case) -> None:
    """Through safetensors bytes and back, bit-exact; a missing tensor is named."""
    fitted = case.fit([case.pair(20, 0)], case.pair(20, 5), (1e-4,))
    tensors = load(save({k: v.contiguous() for k, v in fitted.map_.tensors().items()}))
    again = case.kind.from_tensors(tensors).to("cpu")
    x = case.source(3, 9).float()
    assert torch.equal(again.apply(x), fitted.map_.apply(x))
    name = sorted(tensors)[-1]
    del tensors[name]
    with pytest.raises(StateFileError, match=name):
        case.kind.from_tensors(tensors)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_refuses_nan_and_names_the_group(case: Case, value: float, side: int) -> None:
    pair = [t.clone() for t in case.pair(20, 0)]
    pair[side][(7, *(-1 for _ in case.shape))] = value
    with pytest.raises(FitError, match=rf"(source|receiver).*{case.bad_group}"):
        case.fit([tuple(pair)], case.pair(20, 5), (1e-4,))
    with pytest.raises(FitError, match=case.bad_group):
        case.fit([case.pair(20, 5)], tuple(pair), (1e-4,))


def test_refuses_a_single_state(case: Case) -> None:
    few = tuple(t[:0] for t in case.pair(20, 0))
    with pytest.raises(FitError, match="at least two training"):
        case.fit([few], case.pair(20, 5), (1e-4,))
    with pytest.raises(FitError, match="at least two validation"):
        case.fit([case.pair(20, 5)], few, (1e-4,))


def test_refuses_another_geometry(case: Case) -> None:
    """Each axis that the map depends on is checked and named with both sizes."""
    fitted = case.fit([case.pair(20, 0)], case.pair(20, 5), (1e-4,))
    x = case.source(2, 9)
    with pytest.raises(StateMismatch, match="axes"):
        fitted.map_.apply(x[0])
    with pytest.raises(StateMismatch, match=f"expected {x.shape[1]}, found {x.shape[1] - 1}"):
        fitted.map_.apply(x[:, 1:])
    if case.kind is HeadBilinear:
        with pytest.raises(StateMismatch, match="K: expected 3, found 4; V: expected 4, found 3"):
            fitted.map_.apply(x.mT)


@pytest.mark.parametrize("alphas", [(), (-1.0,), (float("nan"),)])
def test_refuses_a_bad_grid(case: Case, alphas: tuple[float, ...]) -> None:
    with pytest.raises(FitError, match="grid of alphas"):
        case.fit([case.pair(20, 0)], case.pair(20, 5), alphas)


def test_regularisation_is_chosen_by_validation(case: Case) -> None:
    """Few noisy training states: a middling alpha must beat both ends of the grid on clean validation data."""
    train, validation = case.pair(10, 0, noise=2.0), case.pair(200, 50)
    fitted = case.fit([train], validation, (1e-9, 1e-2, 1e-1, 1.0, 1e6))
    assert (fitted.choice_ < 4).all()
    assert (fitted.choice_ > 0).any()
    assert (fitted.path_error_[-1] > fitted.validation_error_).all()
