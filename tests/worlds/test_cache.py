"""The history: raw keys that may be gathered, moved and split in any order, and a clock that no gathering moves."""

from __future__ import annotations

import pytest
import torch
from tiny_world import CONFIG, TOKENS, F, conditioning, frames, tiny_model

from statebridge.errors import ConfigError, StateMismatch
from statebridge.worlds import HistoryCache, Rotary, Sampler, rotate, write_chunk
from statebridge.worlds.rollout import generate, last_chunks, observe
from statebridge.worlds.sampler import draw_noise, encode_chunk

MODEL, ROTARY, B = tiny_model(), CONFIG.rotary, 2
WALK, SEEN = conditioning(B, 4), frames(B, 3)
NEXT = WALK.frames(3 * F, 4 * F)


@pytest.fixture(scope="module")
def cache() -> HistoryCache:
    return observe(MODEL, MODEL.empty_cache(B), SEEN, WALK.frames(0, 3 * F))


def _predict(cache: HistoryCache) -> torch.Tensor:
    noisy = frames(B, 1, seed=5)
    found: torch.Tensor = MODEL(noisy, torch.full((B,), 0.7), NEXT, cache.read(ROTARY))[0]
    return found


def test_rotating_and_gathering_commute_to_the_bit(cache: HistoryCache) -> None:
    keep = torch.rand(3 * TOKENS, generator=torch.Generator().manual_seed(0)) < 0.5
    first = cache.gather(keep).read(ROTARY)[0]
    whole = cache.read(ROTARY)[0]
    for layer in range(CONFIG.layers):
        assert torch.equal(first.keys[layer], whole.keys[layer][:, :, keep])
        assert torch.equal(first.values[layer], whole.values[layer][:, :, keep])


def test_the_clock_is_no_length(cache: HistoryCache) -> None:
    pruned = cache.gather(torch.zeros(3 * TOKENS, dtype=torch.bool))
    assert (pruned.next_chunk, pruned.next_time) == (cache.next_chunk, cache.next_time)
    assert cache.next_chunk == 3
    assert cache.next_time == pytest.approx(float(WALK.times[0, 3 * F - 1]) + 1)
    after = write_chunk(MODEL, frames(B, 1), NEXT, pruned)
    assert after.groups[0].chunks.unique().tolist() == [3]
    assert after.groups[0].frames.unique().tolist() == [3 * F, 3 * F + 1]
    with pytest.raises(StateMismatch, match="follow"):
        cache.append(encode_chunk(MODEL, frames(B, 1), NEXT, (), 5))


def test_gathering_shrinks_the_memory(cache: HistoryCache) -> None:
    kept = last_chunks(1, sink=1)(cache)
    assert kept.groups[0].chunks[0].unique().tolist() == [0, 2]
    assert 3 * kept.nbytes == 2 * cache.nbytes
    key = kept.groups[0].keys[0]
    assert key.untyped_storage().nbytes() == key.numel() * key.element_size()


def test_rows_that_keep_different_slots_are_as_if_alone(cache: HistoryCache) -> None:
    g = torch.Generator().manual_seed(3)
    keep = torch.rand(B, 3 * TOKENS, generator=g) < torch.tensor([[0.3], [0.7]])
    together = _predict(cache.gather(keep))
    assert cache.gather(keep).groups[0].padded
    for row in range(B):
        alone = _predict(cache.gather(keep[row]))[row]
        # padding changes the order of sums: float32 rounding
        torch.testing.assert_close(together[row], alone, atol=1e-4, rtol=1e-4)
    assert (together - _predict(cache)).abs().max() > 1e-2


def test_padding_twice_is_padding_once(cache: HistoryCache) -> None:
    g = torch.Generator().manual_seed(4)
    keep = torch.rand(B, 3 * TOKENS, generator=g) < torch.tensor([[0.2], [0.8]])
    once = cache.gather(keep)
    again = once.gather(torch.ones(once.groups[0].slots, dtype=torch.bool))
    assert torch.equal(once.groups[0].chunks, again.groups[0].chunks)
    assert torch.equal(once.groups[0].keys[1], again.groups[0].keys[1])
    assert torch.equal(once.groups[0].valid.sum(1), keep.sum(1))
    assert torch.equal(_predict(once), _predict(again))


def test_head_groups_are_the_whole_and_may_forget_apart(cache: HistoryCache) -> None:
    split = cache.split([[0], [1], [0]])
    assert split.nbytes == cache.nbytes
    # the same sums in the same order, head by head: float32 rounding of another kernel at most
    torch.testing.assert_close(_predict(split), _predict(cache), atol=1e-5, rtol=1e-5)
    nothing = torch.zeros(3 * TOKENS, dtype=torch.bool)
    forgetful = split.gather(nothing, group=1)
    assert forgetful.groups[0].slots == 3 * TOKENS
    assert forgetful.groups[1].slots == 0
    assert (_predict(forgetful) - _predict(cache)).abs().max() > 1e-2
    after = write_chunk(MODEL, frames(B, 1), NEXT, forgetful)
    assert [group.slots for group in after.groups] == [4 * TOKENS, TOKENS]
    plain = encode_chunk(MODEL, frames(B, 1), NEXT, forgetful.read(ROTARY), 3)
    assert torch.equal(
        after.groups[1].keys[1][:, 0], plain.keys[1][:, 0]
    )  # head 1 of layer 1 is in the first group
    with pytest.raises(StateMismatch, match="once"):
        split.split([[0], [0], [0]])


def test_moving_keys_in_time_changes_their_phase_and_nothing_else(cache: HistoryCache) -> None:
    own = cache.groups[0].coordinates
    same = cache.read(ROTARY, [own.clone()])[0]
    assert torch.equal(same.keys[2], cache.read(ROTARY)[0].keys[2])
    moved = own.clone()
    moved[..., 0] -= 2.25
    there = cache.read(ROTARY, [moved])[0]
    assert torch.equal(there.values[2], same.values[2])
    time = ROTARY.pairs[0]
    other = [i for i in range(ROTARY.head_dim) if i % (ROTARY.head_dim // 2) >= time]
    assert torch.equal(there.keys[2][..., other], same.keys[2][..., other])
    assert (there.keys[2] - same.keys[2]).abs().max() > 0.1


def test_a_full_turn_is_no_turn() -> None:
    x = torch.randn(1, 1, 5, 64)
    where = torch.rand(1, 5, 3) * 10
    around = where + torch.tensor([0.0, 0.0, 32.0])
    rotary = Rotary()
    # cosines of larger numbers: float32 rounding
    torch.testing.assert_close(
        rotate(x, *rotary.angles(where)), rotate(x, *rotary.angles(around)), atol=1e-4, rtol=0
    )
    half = where + torch.tensor([0.0, 0.0, 16.0])
    assert (rotate(x, *rotary.angles(where)) - rotate(x, *rotary.angles(half))).abs().max() > 0.1


def test_the_sampler_follows_its_schedule(cache: HistoryCache) -> None:
    history = cache.read(ROTARY)
    found = Sampler().sample(MODEL, NEXT, history, torch.Generator().manual_seed(1))
    noise = draw_noise(MODEL, NEXT, torch.Generator().manual_seed(1))
    x = 0.999 * noise
    for index, (sigma, after) in enumerate([(0.999, 0.957), (0.957, 0.899), (0.899, 0.702), (0.702, 0.0)]):
        x0 = MODEL(x, torch.full((B,), sigma), NEXT, history)[0].clamp(-1, 1)
        assert torch.equal(found.predictions[index], x0)
        x = (1 - after) * x0 + after * ((x - (1 - sigma) * x0) / sigma)
    assert torch.equal(found.final, x0)
    assert torch.equal(found.probe(2), found.predictions[2])
    for step in (-1, 3, 4):
        with pytest.raises(ConfigError, match="schedule"):
            found.probe(step)


def test_only_the_stochastic_sampler_needs_its_random_state(cache: HistoryCache) -> None:
    history = cache.read(ROTARY)
    for stochastic in (False, True):
        one = torch.Generator().manual_seed(1)
        Sampler(stochastic=stochastic).sample(MODEL, NEXT, history, one)
        drawn = torch.Generator().manual_seed(1)
        for _ in range(4 if stochastic else 1):
            draw_noise(MODEL, NEXT, drawn)
        assert torch.equal(one.get_state(), drawn.get_state())
    with pytest.raises(ConfigError, match="levels"):
        Sampler((0.5, 0.7))


def test_removed_history_changes_what_is_made(cache: HistoryCache) -> None:
    made = [
        generate(MODEL, remember(cache), NEXT, torch.Generator().manual_seed(2)).frames
        for remember in (last_chunks(3), last_chunks(1))
    ]
    assert (made[0] - made[1]).abs().max() > 1e-2
