"""Teacher forcing over a doubled sequence is the same function as walking chunk by chunk with a cache."""

import pytest
import torch
from tiny_world import CONFIG, TOKENS, F, conditioning, tiny_model

from experiments.small_world.doubled import Attention, predict, structure, thinned
from statebridge.worlds import Conditioning, WorldModel, write_chunk

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
B, N, T = 2, 8, TOKENS


@pytest.fixture(scope="module")
def model() -> WorldModel:
    return tiny_model()


@pytest.fixture(scope="module", name="conditioning")
def walked() -> Conditioning:
    return conditioning(B, N)


def _attention(conditioning: Conditioning, allowed: torch.Tensor) -> Attention:
    attention = Attention(B, N, T, 16, torch.device("cpu"), T)
    attention.set(allowed, *CONFIG.rotary.angles(conditioning.coordinates(CONFIG.camera, CONFIG.grid)))
    return attention


def _chunks(seed: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(B, N, T, CONFIG.grid.channels, generator=g)


def test_one_pass_equals_walking_with_a_cache(model: WorldModel, conditioning: Conditioning) -> None:
    clean, noisy, sigma = _chunks(2), _chunks(3), torch.rand(B, N)
    allowed = structure(N, T).expand(B, -1, -1)
    together = predict(model, clean, noisy, sigma, conditioning, _attention(conditioning, allowed).dense)
    cache = model.empty_cache(B)
    for i in range(N):
        part = conditioning.frames(i * F, i * F + F)
        frames = CONFIG.grid.unpatchify(noisy[:, i])
        x0, _ = model(frames, sigma[:, i], part, cache.read(CONFIG.rotary))
        # other order of sums: a tolerance of float32 rounding through three layers
        torch.testing.assert_close(CONFIG.grid.patchify(x0), together[:, i], atol=2e-4, rtol=1e-3)
        cache = write_chunk(model, CONFIG.grid.unpatchify(clean[:, i]), part, cache)


def test_hidden_tokens_equal_gathered_ones(model: WorldModel, conditioning: Conditioning) -> None:
    """Hiding tokens of the first two chunks from the fourth on is pruning them before the fourth is made."""
    clean, noisy, sigma = _chunks(2), _chunks(3), torch.rand(B, N)
    keep = torch.rand(2 * T, generator=torch.Generator().manual_seed(5)) < 0.4
    allowed = structure(N, T).expand(B, -1, -1).clone()
    for later in range(3, N):
        allowed[:, [later, N + later], : 2 * T] &= keep
    together = predict(model, clean, noisy, sigma, conditioning, _attention(conditioning, allowed).dense)
    cache = model.empty_cache(B)
    for i in range(N):
        if i == 3:
            rest = torch.ones(cache.groups[0].slots - 2 * T, dtype=torch.bool)
            cache = cache.gather(torch.cat([keep, rest]))
        part = conditioning.frames(i * F, i * F + F)
        x0, _ = model(CONFIG.grid.unpatchify(noisy[:, i]), sigma[:, i], part, cache.read(CONFIG.rotary))
        torch.testing.assert_close(CONFIG.grid.patchify(x0), together[:, i], atol=2e-4, rtol=1e-3)
        cache = write_chunk(model, CONFIG.grid.unpatchify(clean[:, i]), part, cache)


@pytest.mark.filterwarnings("ignore:.*flex_attention.*")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_blocks_equal_the_dense_mask(model: WorldModel, conditioning: Conditioning, device: str) -> None:
    """Values everywhere; gradients on a GPU, the one place where flex_attention has them."""
    allowed = thinned(torch.tensor([2, 7]), N, T)
    assert (allowed & ~structure(N, T)).sum() == 0
    assert (allowed != structure(N, T)).flatten(1).any(1).all()
    attention = Attention(B, N, T, 16, torch.device(device), 16 if device == "cpu" else 128)
    angles = CONFIG.rotary.angles(conditioning.coordinates(CONFIG.camera, CONFIG.grid))
    attention.set(*(x.to(device) for x in (allowed, *angles)))
    g = torch.Generator().manual_seed(4)
    shape = (B, 2, 2 * N * T, 32)
    q, k, v, weight = (torch.randn(shape, generator=g).to(device) for _ in range(4))
    results = []
    for attend in (torch.compile(attention.flex) if device == "cuda" else attention.flex, attention.dense):
        for x in (q, k, v):
            x.requires_grad_(device == "cuda")
        out = attend(q, k, v)
        gradients = torch.autograd.grad((out * weight).sum(), (q, k, v)) if device == "cuda" else ()
        results.append((out, *gradients))
    for ours, dense in zip(*results, strict=True):
        # float32 sums in another order; a GPU may use TF32
        torch.testing.assert_close(ours, dense, atol=1e-4 if device == "cpu" else 2e-2, rtol=1e-3)


def test_no_block_that_a_table_may_allow_is_skipped() -> None:
    attention = Attention(1, 4, 8, 16, torch.device("cpu"), 4)
    blocks = attention.mask.to_dense()[0, 0].bool()  # [16, 16], of 4 x 4 pairs each
    table = structure(4, 8).repeat_interleave(8, dim=0)
    for row in range(16):
        for column in range(16):
            inside = table[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert blocks[row, column] == inside.any(), (row, column)


def test_every_way_of_thinning_leaves_the_recent_past() -> None:
    allowed, whole = thinned(torch.arange(400), 8, 2), structure(8, 2)
    number = torch.arange(8)
    recent = ((number[:, None] - number[None, :]) <= 1).repeat_interleave(2, dim=1)
    hidden = (whole & ~allowed)[:, :8, :16]
    assert not (hidden & recent).any()
    share = hidden.flatten(1).float().mean(1) / whole[:8, :16].float().mean()
    assert 0.3 < (share == 0).float().mean() < 0.65
    assert 0.1 < share.mean() < 0.35
    assert torch.equal(allowed[:, :8, 8 * 2 :], torch.zeros(400, 8, 16, dtype=torch.bool))
