"""Token agreement against scipy, chunking, and bad logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr, softmax

from statebridge.errors import StatebridgeError
from statebridge.stats import token_agreement


def _logits(seed: int, *shape: int) -> torch.Tensor:
    return 3.0 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_equals_scipy(dtype: torch.dtype, tolerance: float) -> None:
    """KL with the reference first, JS in nats; the tolerance is rounding over 101 tokens."""
    p, q = _logits(0, 2, 7, 101), _logits(1, 2, 7, 101)
    got = token_agreement(p, q, dtype=dtype)
    probabilities = softmax(p.numpy(), -1), softmax(q.numpy(), -1)
    assert got.kl.shape == got.js.shape == got.top1.shape == (2, 7)
    assert got.kl.dtype == dtype
    np.testing.assert_allclose(got.kl, rel_entr(*probabilities).sum(-1), rtol=0, atol=tolerance * 10)
    np.testing.assert_allclose(got.js, jensenshannon(*probabilities, axis=-1) ** 2, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(got.top1, probabilities[0].argmax(-1) == probabilities[1].argmax(-1))


def test_top1_and_position() -> None:
    """Only the position that was changed disagrees."""
    p = _logits(0, 5, 11)
    q = p.clone()
    q[3, (int(p[3].argmax()) + 4) % 11] = p[3].max() + 1.0
    got = token_agreement(p, q, dtype=torch.float64)
    assert got.top1.tolist() == [True, True, True, False, True]
    assert (got.kl > 0).tolist() == [False, False, False, True, False]
    assert (got.js > 1e-12).tolist() == [False, False, False, True, False]


def test_adding_a_constant_changes_nothing() -> None:
    p = _logits(0, 4, 33)
    got = token_agreement(p, p + 1000.0, dtype=torch.float64)
    assert got.kl.max() < 1e-12
    assert got.js.max() < 1e-12
    assert got.top1.all()


@pytest.mark.parametrize("cells", [1, 40, 10_000])
def test_chunks_do_not_change_the_answer(cells: int) -> None:
    p, q = _logits(0, 13, 17), _logits(1, 13, 17)
    whole, parts = token_agreement(p, q), token_agreement(p, q, cells=cells)
    torch.testing.assert_close(parts.kl, whole.kl, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(parts.js, whole.js, rtol=1e-6, atol=1e-7)
    assert torch.equal(parts.top1, whole.top1)


def test_masked_tokens() -> None:
    """Minus infinity in both is no token; in the compared one alone it makes KL infinite and JS stay finite."""
    p, q = _logits(0, 2, 9), _logits(1, 2, 9)
    p[:, 4] = q[:, 4] = -torch.inf
    q[1, 2] = -torch.inf
    got = token_agreement(p, q, dtype=torch.float64)
    assert math.isfinite(got.kl[0])
    assert math.isinf(got.kl[1])
    assert (got.js < math.log(2)).all()
    assert (got.js > 0).all()
    disjoint = torch.tensor([[0.0, -torch.inf]]), torch.tensor([[-torch.inf, 0.0]])
    assert float(token_agreement(*disjoint).js) == pytest.approx(math.log(2), rel=1e-6)


def test_bfloat16_is_computed_in_float32() -> None:
    """The logits' own rounding stays, none is added: equal to computing on the upcast logits, bit-exact."""
    p, q = _logits(0, 3, 50).bfloat16(), _logits(1, 3, 50).bfloat16()
    assert torch.equal(token_agreement(p, q).kl, token_agreement(p.float(), q.float()).kl)


def test_bad_logits_are_named() -> None:
    p, q = _logits(0, 6, 5), _logits(1, 6, 5)
    with pytest.raises(StatebridgeError, match="cannot be compared"):
        token_agreement(p, q[:, 1:])
    for bad in (torch.nan, torch.inf):
        q[4, 2] = bad
        with pytest.raises(StatebridgeError, match="compared logits of position 4"):
            token_agreement(p, q, cells=10)
    with pytest.raises(StatebridgeError, match="reference logits of position 4"):
        token_agreement(q, p)
    q[4] = -torch.inf
    with pytest.raises(StatebridgeError, match="no possible token"):
        token_agreement(p, q)


def test_no_positions() -> None:
    got = token_agreement(torch.empty(2, 0, 5), torch.empty(2, 0, 5))
    assert got.kl.shape == got.js.shape == got.top1.shape == (2, 0)
    assert got.top1.dtype == torch.bool
