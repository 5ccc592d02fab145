"""Tensors that shrink, rows that differ, coordinates that follow their keys, and PR counted by hand."""

from __future__ import annotations

import pytest
import torch
from pruned_world import HEADS, LAYERS, TOKENS, rollout

from statebridge.errors import PruneError
from statebridge.prune import (
    DeCoPrune,
    Full,
    Streaming,
    Visible,
    prune_chunk,
    pruning_ratio,
    visible_positions,
)
from statebridge.worlds import HistoryCache


def storage_bytes(cache: HistoryCache) -> int:
    """Bytes of the memory behind keys and values, whatever the views on it show."""
    tensors = [x for slots in cache.groups for x in (*slots.keys, *slots.values)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def test_pruned_tokens_leave_the_memory() -> None:
    full = rollout(Full())[0].cache
    pruned = rollout(DeCoPrune(keep_ratio=0.5, sink=1, window=2))[0].cache
    # six chunks: one of sink and two of window whole, three of which half is left
    assert pruned.groups[0].chunks.shape[1] == 3 * TOKENS + 3 * TOKENS // 2
    assert storage_bytes(pruned) * 6 * TOKENS == storage_bytes(full) * pruned.groups[0].chunks.shape[1]


def test_kept_tokens_keep_their_keys_coordinates_and_order() -> None:
    cache = rollout(Full())[0].cache
    mask = torch.rand(2, TOKENS, generator=torch.Generator().manual_seed(0)) > 0.5
    mask[0, 0] = mask[1, -1] = True
    before, after = cache.groups[0], prune_chunk(cache, 2, [mask]).groups[0]
    for row in range(2):
        kept = torch.cat(
            [torch.ones(2 * TOKENS, dtype=torch.bool), mask[row], torch.ones(3 * TOKENS, dtype=torch.bool)]
        )
        real = after.chunks[row] >= 0
        assert torch.equal(after.keys[1][row][:, real], before.keys[1][row][:, kept])
        assert torch.equal(after.values[0][row][:, real], before.values[0][row][:, kept])
        assert torch.equal(after.coordinates[row, real], before.coordinates[row, kept])
        assert torch.equal(after.chunks[row, real], before.chunks[row, kept])


def test_the_clock_is_no_length() -> None:
    session, _ = rollout(Streaming(sink=1, window=1))
    assert (session.clock.chunk, session.clock.frame) == (6, 12.0)
    assert session.cache.groups[0].chunks.shape[1] == 2 * TOKENS


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("sink", [0, 2])
def test_exactly_sink_and_window_stay_whole(sink: int, window: int) -> None:
    session, _ = rollout(Streaming(sink=sink, window=window), observed=5)
    present = session.cache.groups[0].chunks.unique().tolist()
    assert present == [*range(sink), *range(7 - window, 7)]


def test_pr_equals_a_count_by_hand() -> None:
    session, _ = rollout(Streaming(sink=1, window=1), observed=3, generated=2)
    # chunks 0 to 4 see 0, 1, 2, 2, 2 chunks; full would be 0, 1, 2, 3, 4
    unit = TOKENS * LAYERS * HEADS * 2
    assert [entry.positions // unit for entry in session.seen] == [0, 1, 2, 2, 2]
    assert [entry.full // unit for entry in session.seen] == [0, 1, 2, 3, 4]
    assert session.pruning_ratio() == 1 - 7 / 10
    assert session.pruning_ratio(first_chunk=3) == 1 - 4 / 7


def test_pr_counts_rows_as_they_are_and_not_their_padding() -> None:
    cache = rollout(Full())[0].cache
    mask = torch.zeros(2, TOKENS, dtype=torch.bool)
    mask[1, :4] = True
    pruned = prune_chunk(cache, 2, [mask])
    assert visible_positions(pruned) == (2 * 5 * TOKENS + 4) * LAYERS * HEADS


def test_pr_of_nothing_is_zero() -> None:
    assert pruning_ratio([Visible(0, 0, 0)]) == 0.0


def test_a_chunk_is_pruned_once() -> None:
    cache = rollout(Full())[0].cache
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[:, 0] = False
    with pytest.raises(PruneError, match="pruned once"):
        prune_chunk(prune_chunk(cache, 2, [mask]), 2, [mask])


def test_a_mask_that_would_empty_a_layer_is_refused() -> None:
    cache = rollout(Full(), observed=1, generated=0)[0].cache
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[1] = False
    with pytest.raises(PruneError, match="row 1 and would empty"):
        prune_chunk(cache, 0, [mask])
