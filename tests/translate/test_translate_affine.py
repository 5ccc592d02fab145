"""Moments and affine ridge against numpy and scikit-learn, and the corners of the affine maps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from statebridge.errors import FitError, StateFileError
from statebridge.translate import (
    AffineRidge,
    BlockLayout,
    BlockMoments,
    BlockRidge,
    KeyValueRidge,
    Moments,
    head_moments,
    head_rows,
)

G, DX, DY = 3, 6, 4


def _rows(n: int, seed: int, offset: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(G, n, DX, generator=generator, dtype=torch.float64) * torch.arange(1, DX + 1) + offset
    weight = torch.randn(G, DX, DY, generator=generator, dtype=torch.float64)
    return x, x @ weight + torch.randn(G, n, DY, generator=generator, dtype=torch.float64) - offset


def _moments(x: Tensor, y: Tensor) -> Moments:
    return Moments(x.shape[0], x.shape[2], y.shape[2]).update(x, y)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("n", [1, 257])
def test_moments_are_those_of_numpy(offset: float, n: int) -> None:
    """To 1e-9 relative even where the mean is a million times the spread (uncentred sums would lose it all)."""
    x, y = _rows(n, 0, offset)
    moments = Moments(G, DX, DY)
    for start in range(0, n, 50):
        moments.update(x[:, start : start + 50], y[:, start : start + 50])
    assert moments.count == n
    for g in range(G):
        cx, cy = (t[g].numpy() - t[g].numpy().mean(0) for t in (x, y))
        scale = max(np.abs(cx.T @ cx).max(), 1.0)
        np.testing.assert_allclose(moments.mean_x[g], x[g].mean(0), rtol=1e-14)
        np.testing.assert_allclose(moments.sxx[g], cx.T @ cx, rtol=0, atol=1e-9 * scale)
        np.testing.assert_allclose(moments.sxy[g], cx.T @ cy, rtol=0, atol=1e-8 * scale)
        np.testing.assert_allclose(moments.syy[g], (cy**2).sum(0), rtol=0, atol=1e-8 * scale)


def test_long_batches_are_split_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = _rows(103, 0)
    whole = _moments(x, y)
    monkeypatch.setattr("statebridge.translate.moments._ROWS", 10)
    parts = _moments(x, y)
    assert parts.count == 103
    torch.testing.assert_close(parts.sxy, whole.sxy, rtol=1e-12, atol=1e-10)


def test_merge_with_an_empty_shard_changes_nothing() -> None:
    """Bit-exact, either way round: a process may have got no document."""
    x, y = _rows(20, 0)
    alone = _moments(x, y)
    for merged in (_moments(x, y).merge(Moments(G, DX, DY)), Moments(G, DX, DY).merge(_moments(x, y))):
        assert merged.count == 20
        for name, tensor in alone.state_dict().items():
            assert torch.equal(merged.state_dict()[name], tensor), name


def test_float32_rows_are_accumulated_in_float64() -> None:
    """One large row must not swallow the small ones, as it would in float32."""
    x = torch.ones(1, 10_001, 1)
    x[0, 0] = 1e4
    x[0, 1::2] += 2**-10
    assert float(_moments(x, x).sxx) == pytest.approx(float(np.var(x.double().numpy()) * 10_001), rel=1e-12)


def test_accumulation_resumes() -> None:
    """State dict and back, then more rows: the same as never stopping, bit-exact; and the old one is not moved."""
    x, y = _rows(40, 0)
    straight = _moments(x[:, :25], y[:, :25]).update(x[:, 25:], y[:, 25:])
    first = _moments(x[:, :25], y[:, :25])
    kept = first.sxx.clone()
    resumed = Moments.from_state_dict(first.state_dict()).update(x[:, 25:], y[:, 25:])
    assert resumed.count == 40
    assert torch.equal(resumed.sxx, straight.sxx)
    assert torch.equal(resumed.syy, straight.syy)
    assert torch.equal(first.sxx, kept)
    with pytest.raises(StateFileError, match="sxy"):
        Moments.from_state_dict({k: v for k, v in first.state_dict().items() if k != "sxy"})


def test_a_refused_batch_leaves_no_trace() -> None:
    x, y = _rows(20, 0)
    moments = _moments(x, y)
    before = moments.sxx.clone()
    bad = y.clone()
    bad[1, 3, 2] = torch.nan
    with pytest.raises(FitError, match="receiver rows of group 1"):
        moments.update(x, bad)
    assert moments.count == 20
    assert torch.equal(moments.sxx, before)


def test_moments_refuse_other_shapes() -> None:
    x, y = _rows(20, 0)
    with pytest.raises(FitError, match="equal G and N"):
        _moments(x, y[:, 1:])
    with pytest.raises(FitError, match="were given rows of"):
        Moments(G, DX + 1, DY).update(x, y)
    with pytest.raises(FitError, match="cannot be merged"):
        Moments(G, DX + 1, DY).merge(_moments(x, y))
    with pytest.raises(FitError, match="do not belong together"):
        AffineRidge().fit(_moments(x, y), _moments(y, x))


@pytest.mark.parametrize("alpha", [1e-4, 1.0, 300.0])
@pytest.mark.parametrize("n", [3, 500])  # fewer rows than channels, and many
def test_ridge_is_that_of_scikit_learn(alpha: float, n: int) -> None:
    """Same alpha, same rows, in batches of any size; 1e-7 covers both solvers' rounding at the worst condition."""
    x, y = _rows(n, 1)
    moments = Moments(G, DX, DY)
    for start in range(0, n, 7):
        moments.update(x[:, start : start + 7], y[:, start : start + 7])
    fitted = AffineRidge(alphas=(alpha,), relative=False).fit(moments, moments)
    assert torch.equal(fitted.alpha_, torch.full((G,), alpha, dtype=torch.float64))
    for g in range(G):
        oracle = Ridge(alpha, fit_intercept=True).fit(x[g].numpy(), y[g].numpy())
        np.testing.assert_allclose(fitted.weight_[g], oracle.coef_.T, rtol=0, atol=1e-7)
        np.testing.assert_allclose(fitted.bias_[g], oracle.intercept_, rtol=0, atol=1e-7)


def test_relative_alpha_follows_the_trace_of_each_group() -> None:
    x, y = _rows(50, 1)
    x = x * torch.tensor([1.0, 10.0, 0.1])[:, None, None]
    moments = _moments(x, y)
    fitted = AffineRidge(alphas=(0.2,)).fit(moments, moments)
    centred = x - x.mean(1, keepdim=True)
    torch.testing.assert_close(fitted.alpha_, 0.2 * centred.square().sum((1, 2)) / DX, rtol=1e-12, atol=0)
    again = AffineRidge(alphas=(float(fitted.alpha_[1]),), relative=False).fit(moments, moments)
    torch.testing.assert_close(again.weight_[1], fitted.weight_[1], rtol=1e-12, atol=1e-12)


def test_every_group_chooses_for_itself() -> None:
    """Group 0 validates on clean rows of the same map; group 1 on rows that have nothing to do with it."""
    x, y = _rows(200, 1)
    train = _moments(x[:2], y[:2])
    valid_x, valid_y = x[:2].clone(), y[:2].clone()
    valid_y[1] = torch.randn(200, DY, generator=torch.Generator().manual_seed(9)) + y[1].mean(0)
    fitted = AffineRidge(alphas=(1e-6, 1e6)).fit(train, _moments(valid_x, valid_y))
    assert fitted.choice_.tolist() == [0, 1]
    assert fitted.validation_error_[1] < fitted.path_error_[0, 1]


def test_rounding_does_not_choose() -> None:
    """Errors that differ by rounding only are a tie, and the largest alpha takes it, in any order of the grid."""
    x, _ = _rows(100, 1)
    moments = _moments(x, x)
    assert AffineRidge(alphas=(1e-15, 1e-12, 1e-1)).fit(moments, moments).choice_.tolist() == [1] * G
    assert AffineRidge(alphas=(1e-1, 1e-12, 1e-15)).fit(moments, moments).choice_.tolist() == [1] * G


@pytest.mark.parametrize("alphas", [(0.0,), (1e-12,), (1e-3,)])
def test_constant_and_repeated_channels(alphas: tuple[float, ...]) -> None:
    """A singular S_xx: finite weights, 0 for what does not vary, and still the right answer."""
    x, y = _rows(100, 1)
    x[:, :, 2] = 7.25
    x[:, :, 5] = x[:, :, 4]
    moments = _moments(x, y)
    fitted = AffineRidge(alphas=alphas).fit(moments, moments)
    assert torch.isfinite(fitted.weight_).all()
    assert fitted.weight_[:, 2].abs().max() < 1e-9
    torch.testing.assert_close(fitted.weight_[:, 5], fitted.weight_[:, 4], rtol=1e-6, atol=1e-9)
    least = np.linalg.lstsq((x[0] - x[0].mean(0)).numpy(), (y[0] - y[0].mean(0)).numpy(), rcond=1e-12)[0]
    np.testing.assert_allclose(fitted.weight_[0], least, rtol=0, atol=1e-6 + 50 * alphas[0])


def test_a_source_that_never_varies_predicts_the_mean() -> None:
    _, y = _rows(30, 1)
    x = torch.ones(G, 30, DX)
    fitted = AffineRidge().fit(_moments(x, y), _moments(x, y))
    assert not fitted.weight_.any()
    torch.testing.assert_close(fitted.bias_, y.mean(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fitted.validation_error_, torch.ones(G, dtype=torch.float64))


def test_a_receiver_that_never_varies_has_a_defined_error() -> None:
    x, _ = _rows(30, 1)
    y = torch.full((G, 30, DX), 3.0, dtype=torch.float64)
    fitted = AffineRidge().fit(_moments(x, y), _moments(x, y))
    assert fitted.validation_error_.tolist() == [0.0] * G
    assert fitted.copy_error_.tolist() == [float("inf")] * G
    assert AffineRidge().fit(_moments(x, _rows(30, 1)[1]), _moments(x, _rows(30, 2)[1])).copy_error_ is None


def test_moments_gone_bad_on_the_way_are_named() -> None:
    x, y = _rows(30, 1)
    state = {k: v.clone() for k, v in _moments(x, y).state_dict().items()}
    state["sxy"][2, 0, 0] = torch.nan
    bad = Moments.from_state_dict(state, names=["a", "b", "channels 5..9"])
    with pytest.raises(FitError, match=r"training moments of channels 5\.\.9"):
        AffineRidge().fit(bad, _moments(x, y))


def test_masked_tokens_give_no_row() -> None:
    """Left padding: the padded tokens may hold anything, even NaN."""
    x = torch.arange(2 * 3 * 5 * 2, dtype=torch.float32).view(2, 3, 5, 2)
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    x[0, :, :2] = torch.nan
    rows = head_rows(x, mask)
    assert rows.shape == (3, 8, 2)
    assert torch.equal(rows[1], torch.cat([x[0, 1, 2:], x[1, 1]]))
    moments = head_moments(3, 2, 2).update(rows, rows)
    assert KeyValueRidge((1e-3,)).fit(moments, moments).map_.weight.shape == (3, 2, 2)
    with pytest.raises(FitError, match="mask"):
        head_rows(x, mask[:, 1:])


def test_heads_may_change_their_width() -> None:
    x, y = torch.randn(2, 3, 9, 5), torch.randn(2, 3, 9, 4)
    moments = head_moments(3, 5, 4).update(head_rows(x), head_rows(y))
    assert KeyValueRidge().fit(moments, moments).map_.apply(x).shape == (2, 3, 9, 4)


def test_layout_of_packed_projections() -> None:
    layout = BlockLayout.of_heads((2, 3), (2, 3), (3, 5))
    assert layout.blocks == ((0, 3), (3, 3), (6, 3), (9, 3), (12, 5), (17, 5), (22, 5))
    assert layout.channels == 27
    assert layout.index(5).tolist()[1] == [17, 18, 19, 20, 21]


@pytest.mark.parametrize("blocks", [((0, 3), (4, 2)), ((0, 3), (2, 2)), ((1, 3),), ((0, 0), (0, 3))])
def test_layout_refuses_gaps_and_overlaps(blocks: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(FitError, match="cover every channel once"):
        BlockLayout(blocks)


def test_blocks_in_any_order_of_size() -> None:
    """Results come in the order of the layout, not of the sizes."""
    layout = BlockLayout(((4, 5), (0, 4), (9, 5)))
    x = torch.randn(30, 14, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = x.clone()
    y[:, 0:4] = torch.randn(30, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moments = BlockMoments(layout).update(x, y)
    fitted = BlockRidge((1e-12,)).fit(moments, moments)
    assert [round(float(e)) for e in fitted.validation_error_] == [0, 1, 0]
    assert [float(e) < 1e-7 for e in fitted.copy_error_] == [True, False, True]
    assert torch.allclose(fitted.map_.apply(x.float())[:, 4:], x.float()[:, 4:], atol=1e-5)


def test_block_moments_resume_and_refuse_other_layouts() -> None:
    layout, other = BlockLayout(((0, 2), (2, 3))), BlockLayout(((0, 3), (3, 2)))
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0))
    moments = BlockMoments(layout).update(x[:4], 2 * x[:4])
    resumed = BlockMoments.from_state_dict(moments.state_dict(), layout).update(x[4:], 2 * x[4:])
    straight = moments.update(x[4:], 2 * x[4:])
    for name, tensor in straight.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], tensor), name
    with pytest.raises(FitError, match="channel layouts"):
        moments.merge(BlockMoments(other))
    with pytest.raises(FitError, match="channel layouts"):
        BlockRidge().fit(moments, BlockMoments(other))
    with pytest.raises(FitError, match=r"\[B, 5, W\]"):
        moments.update(x, x[:, :4])
