"""Corners of the bilinear fit: other dimensions, blocks, stopping, scale."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import translate_naive as naive
from torch import Tensor

from statebridge.errors import FitError
from statebridge.translate import BilinearRidge

H, K_S, V_S, K_R, V_R = 2, 5, 3, 4, 6


def _pair(n: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    maps = torch.Generator().manual_seed(99)
    left = torch.eye(K_R, K_S) + 0.3 * torch.randn(H, K_R, K_S, generator=maps)
    right = torch.eye(V_R, V_S) + 0.3 * torch.randn(H, V_R, V_S, generator=maps)
    x = torch.randn(n, H, K_S, V_S, generator=generator) + 1.0
    return x, left @ x @ right.mT - 2.0


def test_other_dimensions_on_the_other_side() -> None:
    """K and V both change: recovered to float32 rounding of the data, and equal to the loops."""
    train, valid = _pair(60, 0), _pair(20, 1)
    fitted = BilinearRidge((1e-12,), n_iter=60, tol=0.0).fit(lambda: [train], lambda: [valid])
    assert fitted.map_.left.shape == (H, K_R, K_S)
    assert fitted.map_.right.shape == (H, V_R, V_S)
    assert fitted.copy_error_ is None
    x, y = _pair(4, 2)
    torch.testing.assert_close(fitted.map_.apply(x), y, rtol=0, atol=1e-4)
    looped = naive.bilinear_heads(*train, 0.05, 7, x)
    again = BilinearRidge((0.05,), n_iter=7, tol=0.0).fit(lambda: [train], lambda: [valid])
    np.testing.assert_allclose(again.map_.apply(x), looped, rtol=0, atol=1e-5)


def test_the_scale_between_the_factors_is_fixed() -> None:
    """Equal root-mean-square singular value, and the sign that gives A a positive trace."""
    x, y = _pair(60, 0)
    mean = y.mean(0)
    for data in ((x, y), (x, mean - 50 * (y - mean))):  # the second: a negative and large map
        fitted = BilinearRidge((1e-6,)).fit(lambda d=data: [d], lambda d=data: [d])
        left, right = fitted.map_.left, fitted.map_.right
        rms_left = left.norm(dim=(1, 2)) / K_R**0.5
        rms_right = right.norm(dim=(1, 2)) / V_S**0.5
        torch.testing.assert_close(rms_left, rms_right, rtol=1e-5, atol=0)
        assert (left.diagonal(dim1=1, dim2=2).sum(1) > 0).all()
        assert (fitted.validation_error_ < 1e-3).all()


def test_the_answer_does_not_depend_on_units() -> None:
    """Relative regularisation: a source in other units gives the same prediction, to float32 rounding."""
    x, y = _pair(12, 0)
    plain = BilinearRidge((0.1,)).fit(lambda: [(x, y)], lambda: [(x, y)])
    scaled = BilinearRidge((0.1,)).fit(lambda: [(64 * x, y)], lambda: [(x, y)])
    torch.testing.assert_close(scaled.map_.apply(64 * x), plain.map_.apply(x), rtol=1e-4, atol=1e-4)


def test_heads_do_not_see_each_other() -> None:
    x, y = _pair(40, 0)
    both = BilinearRidge((1e-3,), n_iter=5, tol=0.0).fit(lambda: [(x, y)], lambda: [(x, y)])
    one = BilinearRidge((1e-3,), n_iter=5, tol=0.0).fit(
        lambda: [(x[:, 1:], y[:, 1:])], lambda: [(x[:, 1:], y[:, 1:])]
    )
    torch.testing.assert_close(both.map_.left[1:], one.map_.left, rtol=1e-6, atol=1e-6)


def test_each_head_chooses_its_own_value() -> None:
    x, y = _pair(40, 0)
    valid_x, valid_y = _pair(40, 1)
    valid_y = valid_y.clone()
    valid_y[:, 1] = y[:, 1].mean(0) + torch.randn(40, K_R, V_R, generator=torch.Generator().manual_seed(5))
    fitted = BilinearRidge((1e-6, 1e4)).fit(lambda: [(x, y)], lambda: [(valid_x, valid_y)])
    assert fitted.choice_.tolist() == [0, 1]
    assert fitted.alpha_.tolist() == [1e-6, 1e4]
    assert fitted.path_error_.shape == (2, H)


def test_it_stops_when_nothing_moves() -> None:
    x, y = _pair(40, 0)
    assert BilinearRidge((1e-6,), n_iter=50, tol=1e-4).fit(lambda: [(x, y)], lambda: [(x, y)]).n_iter_ < 50
    assert BilinearRidge((1e-6,), n_iter=3, tol=0.0).fit(lambda: [(x, y)], lambda: [(x, y)]).n_iter_ == 3


def test_no_sweeps_leave_the_identity() -> None:
    """Where the alternation starts: rectangular identities, scaled alike."""
    x, y = _pair(10, 0)
    fitted = BilinearRidge(n_iter=0).fit(lambda: [(x, y)], lambda: [(x, y)])
    assert torch.equal(fitted.map_.left, torch.eye(K_R, K_S).expand(H, K_R, K_S))
    assert torch.equal(fitted.map_.right, torch.eye(V_R, V_S).expand(H, V_R, V_S))


def test_states_that_never_vary_predict_the_mean() -> None:
    x, y = torch.ones(10, H, K_S, V_S), _pair(10, 0)[1]
    fitted = BilinearRidge().fit(lambda: [(x, y)], lambda: [(x, y)])
    torch.testing.assert_close(fitted.map_.apply(x[:1])[0], y.mean(0), rtol=1e-5, atol=1e-5)


def test_states_are_read_from_a_memory_map_and_left_alone(tmp_path) -> None:
    x, y = _pair(16, 0)
    stored = []
    for name, t in (("x", x), ("y", y)):
        np.save(tmp_path / f"{name}.npy", t.numpy())
        stored.append(np.load(tmp_path / f"{name}.npy", mmap_mode="c"))

    def blocks() -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, 16, 5):
            yield tuple(torch.from_numpy(a[start : start + 5]) for a in stored)

    mapped = BilinearRidge((1e-3,)).fit(blocks, blocks)
    direct = BilinearRidge((1e-3,)).fit(lambda: [(x, y)], lambda: [(x, y)])
    torch.testing.assert_close(mapped.map_.left, direct.map_.left, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mapped.validation_error_, direct.validation_error_, rtol=1e-9, atol=0)
    assert np.array_equal(stored[0], x.numpy())


def test_a_used_up_iterator_is_refused() -> None:
    pairs = iter([_pair(10, 0)])
    with pytest.raises(FitError, match="training states found 0, the first pass 10"):
        BilinearRidge().fit(lambda: pairs, lambda: [_pair(10, 1)])


def test_unpaired_states_are_refused() -> None:
    x, y = _pair(10, 0)
    with pytest.raises(FitError, match="Pair the same documents"):
        BilinearRidge().fit(lambda: [(x, y[1:])], lambda: [(x, y)])
    with pytest.raises(FitError, match="positive numbers"):
        BilinearRidge((0.0,)).fit(lambda: [(x, y)], lambda: [(x, y)])
