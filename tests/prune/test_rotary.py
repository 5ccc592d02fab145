"""Re-indexing: keys' phases move as the formula says, and nothing else does."""

from __future__ import annotations

import math

import pytest
import torch
from pruned_world import rollout, tiny_backbone

from statebridge.errors import PruneError
from statebridge.prune import DeCoPrune, Full, Reindex, Rotation
from statebridge.prune.rotary import keys_at
from statebridge.worlds.rotary import rotate


def test_times_follow_the_formula() -> None:
    g = Reindex(recent=4, span=10)
    t = torch.tensor([0.0, 8.0, 16.0, 17.0, 20.0], dtype=torch.float64)
    # q0 = 20: offsets 20, 12, 4, 3, 0; beyond 4 the slope is (10 − 4) / (20 − 4) = 0.375
    assert g.times(t, 20.0).tolist() == [10.0, 20 - (4 + 8 * 0.375), 16.0, 17.0, 20.0]


def test_times_stay_in_order_and_within_the_span() -> None:
    t = torch.arange(240, dtype=torch.float64)
    moved = Reindex(recent=16, span=64).times(t, 240.0)
    assert (moved.diff() > 0).all()
    assert 240 - moved[0] == 64
    assert torch.equal(moved[224:], t[224:])
    assert (moved[:224] != moved[:224].round()).any()


def test_a_span_that_reaches_back_to_the_start_changes_no_bit() -> None:
    plain, moved = (rollout(Full(), reindex=g)[1] for g in (None, Reindex(recent=2, span=100)))
    for a, b in zip(plain, moved, strict=True):
        assert torch.equal(a, b)


def test_a_narrow_span_changes_what_full_kv_makes_and_nothing_in_the_cache_of_observed_chunks() -> None:
    narrow = Reindex(recent=1, span=3)
    (plain, a), (moved, b) = (rollout(Full(), reindex=g) for g in (None, narrow))
    assert not torch.allclose(a[0], b[0], atol=1e-3)
    for name in ("coordinates", "chunks", "frames"):
        assert torch.equal(getattr(plain.cache.groups[0], name), getattr(moved.cache.groups[0], name))


def test_reading_moves_time_channels_of_keys_and_leaves_values_and_other_channels() -> None:
    session, _ = rollout(Full())
    slots, g = session.cache.groups[0], Reindex(recent=2, span=5)
    (where,) = g.coordinates(session.cache)
    assert torch.equal(where[..., 1:], slots.coordinates[..., 1:])
    ((plain,), (moved,)) = (session.backbone.read(session.cache, w) for w in (None, [where]))
    assert torch.equal(plain.values[0], moved.values[0])
    turned = (plain.keys[0] != moved.keys[0]).any(2).any(0).any(0)  # [D]
    # pairs of (time, height, azimuth) are (2, 2, 2), channel i with i + 6
    assert turned.tolist() == [True] * 2 + [False] * 4 + [True] * 2 + [False] * 4


def test_rotating_then_gathering_is_gathering_then_rotating() -> None:
    session, _ = rollout(Full())
    keep = torch.rand(2, 6 * 18, generator=torch.Generator().manual_seed(2)) > 0.4
    keep[:, :40] = True
    pruned = session.cache.gather(keep)
    first = session.backbone.read(pruned, None)[0].keys[1]
    second = session.cache.groups[0]
    rotated = session.backbone.read(session.cache, None)[0].keys[1]
    for row in range(2):
        real = pruned.groups[0].chunks[row] >= 0
        assert torch.equal(first[row][:, real], rotated[row][:, keep[row]])  # bit-exact: element by element
    assert second.chunks.shape[1] > pruned.groups[0].chunks.shape[1]


def test_rotated_keys_are_moved_by_the_difference_and_raw_keys_rotated_once() -> None:
    rotary = tiny_backbone().model.config.rotary
    draw = torch.Generator().manual_seed(4)
    key = torch.randn(1, 2, 5, 12, generator=draw)
    written = torch.rand(1, 5, 3, generator=draw) * 8
    wanted = written.clone()
    wanted[..., 0] *= 0.3

    def turn(x: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return rotate(x, *rotary.angles(where))

    raw = keys_at(key, Rotation.RAW, written, wanted, turn)
    held = keys_at(turn(key, written), Rotation.WRITTEN, written, wanted, turn)
    torch.testing.assert_close(raw, held, atol=1e-5, rtol=1e-5)  # two float32 rotations against one
    assert torch.equal(keys_at(turn(key, written), Rotation.WRITTEN, written, None, turn), turn(key, written))


def test_an_adapter_that_does_not_know_its_rotation_is_refused() -> None:
    with pytest.raises(PruneError, match="does not say whether"):
        keys_at(torch.zeros(1, 1, 1, 2), Rotation.UNKNOWN, torch.zeros(1, 1, 3), None, lambda x, _: x)


@pytest.mark.parametrize(("recent", "span"), [(4, 4), (-1, 4), (8, 4)])
def test_impossible_spans_are_refused(recent: float, span: float) -> None:
    with pytest.raises(PruneError, match="recent < span"):
        Reindex(recent, span)


def test_pruned_history_reads_at_fractional_times() -> None:
    session, made = rollout(DeCoPrune(keep_ratio=0.3, window=1), reindex=Reindex(recent=1, span=4))
    assert all(bool(x.isfinite().all()) for x in made)
    times = Reindex(recent=1, span=4).coordinates(session.cache)[0][..., 0]
    assert bool((times != times.round()).any())
    assert math.isclose(session.clock.frame - float(times.min()), 4.0, rel_tol=1e-6)
    assert session.cache.groups[0].coordinates[..., 0].min() == 0
