"""AnyFlow through its adapter: the bits of its own loop where nothing is pruned, and what pruning may change."""

from __future__ import annotations

import math

import pytest
import torch
from anyflow_stock import CHUNKS, FRAMES, SIDE, TOKENS, stock_rollout, text, tiny_model

from statebridge.errors import PruneError
from statebridge.prune import (
    DeCoPrune,
    DeCoPruneHS,
    Full,
    HeadSplit,
    Policy,
    PrunedSession,
    Rotation,
    Streaming,
)
from statebridge.prune.adapters.anyflow import TIMESTEPS, AnyFlow
from statebridge.prune.attention import attend_groups

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
SPLIT = HeadSplit(((True, False), (True, False)))


def backbone(rotation: Rotation = Rotation.RAW, full_chunk_limit: int = 8) -> AnyFlow:
    return AnyFlow(tiny_model(full_chunk_limit), height=SIDE, width=SIDE, frames=FRAMES, rotation=rotation)


def rollout(
    policy: Policy, chunks: int = CHUNKS, rotation: Rotation = Rotation.RAW
) -> tuple[PrunedSession, list[torch.Tensor]]:
    session = PrunedSession(backbone(rotation), policy, batch=2, seed=1)
    return session, [session.generate(text()).final for _ in range(chunks)]


@pytest.fixture(scope="module")
def full() -> tuple[PrunedSession, list[torch.Tensor]]:
    return rollout(Full())


def test_unpruned_it_is_the_models_own_loop_bit_for_bit(
    full: tuple[PrunedSession, list[torch.Tensor]],
) -> None:
    session, made = full
    again = PrunedSession(backbone(), Full(), batch=2, seed=1)
    noises = []
    for _ in range(CHUNKS):
        noises.append(again.backbone._noise(text(), again._generator(0)))
        again.generate(text())
    own, cache = stock_rollout(tiny_model(), noises, text(), TIMESTEPS)
    for a, b in zip(made, own, strict=True):
        assert torch.equal(a, b)
    # the pipeline writes no cache for the last chunk that it makes
    for layer, content in cache.items():
        assert torch.equal(session.cache.groups[0].keys[layer], content["full_cache"][0])
        assert torch.equal(session.cache.groups[0].values[layer], content["full_cache"][1])


def test_zero_keys_take_part_as_in_the_model_itself(full: tuple[PrunedSession, list[torch.Tensor]]) -> None:
    session, _ = full
    history = session.backbone.read(session.cache, None)
    noise = session.backbone._noise(text(), torch.Generator().manual_seed(0))
    bare = session.backbone._passes(history, padded=False)
    t, r = session.backbone.scheduler.timesteps[:2]
    plain = session.backbone._run(bare, session.clock, noise, t, r, text())
    padded = session.backbone._velocity(history, session.clock, noise, 0, text())
    assert (plain - padded).abs().max() > 0.01


def test_a_threshold_of_minus_infinity_is_full_kv_bit_for_bit(
    full: tuple[PrunedSession, list[torch.Tensor]],
) -> None:
    for a, b in zip(rollout(DeCoPrune(threshold=-math.inf, window=1))[1], full[1], strict=True):
        assert torch.equal(a, b)


def test_a_threshold_of_infinity_is_streaming_bit_for_bit(
    full: tuple[PrunedSession, list[torch.Tensor]],
) -> None:
    ours, streaming = (rollout(p)[1] for p in (DeCoPrune(threshold=math.inf, window=1), Streaming(window=1)))
    for a, b in zip(ours, streaming, strict=True):
        assert torch.equal(a, b)
    assert (streaming[3] - full[1][3]).abs().max() > 0.01


def test_keys_cached_where_they_were_written_give_the_same_chunks(
    full: tuple[PrunedSession, list[torch.Tensor]],
) -> None:
    session, made = rollout(Full(), rotation=Rotation.WRITTEN)
    # the last chunk was never at time 0, so its rotated keys are others than its raw ones
    assert not torch.allclose(session.cache.groups[0].keys[0], full[0].cache.groups[0].keys[0], atol=0.1)
    for a, b in zip(made, full[1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)  # one more rounding to float32 a key


@pytest.mark.parametrize(
    "policy", [DeCoPrune(threshold=-math.inf), DeCoPrune(threshold=0.2, window=1)], ids=["all", "some"]
)
def test_a_generated_chunk_costs_four_calls_and_the_clean_pass(policy: Policy) -> None:
    session = PrunedSession(backbone(), policy, batch=2)
    calls: list[int] = []
    session.backbone.model.register_forward_hook(lambda *_: calls.append(1))
    for _ in range(3):
        session.generate(text())
    assert len(calls) == 3 * (len(TIMESTEPS) + 1)


def test_head_groups_and_padding_read_like_one_group(full: tuple[PrunedSession, list[torch.Tensor]]) -> None:
    session, _ = full
    draw = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, 2, 5, 12, generator=draw) for _ in range(3))
    one, two = session.cache, session.cache.split(((0,), (1,)))
    whole, split = (
        attend_groups(0, query, key, value, session.backbone.read(cache, None)) for cache in (one, two)
    )
    torch.testing.assert_close(whole, split, atol=1e-6, rtol=1e-5)  # float32, other shapes of one product
    assert (whole[:, 0] - whole[:, 1]).abs().max() > 0.01


def test_padding_of_a_row_takes_no_part(full: tuple[PrunedSession, list[torch.Tensor]]) -> None:
    session, _ = full
    draw = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, 2, 5, 12, generator=draw) for _ in range(3))
    keep = torch.ones(2, CHUNKS * TOKENS, dtype=torch.bool)
    keep[1, 10:50] = False
    ragged = session.backbone.read(session.cache.gather(keep), None)
    assert ragged[0].valid is not None
    together = attend_groups(0, query, key, value, ragged)
    (slots,) = session.backbone.read(session.cache, None)
    for row in range(2):
        k = torch.cat([slots.keys[0][row][:, keep[row]], key[row]], 1)
        v = torch.cat([slots.values[0][row][:, keep[row]], value[row]], 1)
        alone = (query[row] @ k.transpose(1, 2) / 12**0.5).softmax(-1) @ v
        torch.testing.assert_close(together[row], alone, atol=1e-5, rtol=1e-4)  # float32, another order


def test_ragged_rows_and_head_groups_run_and_shrink() -> None:
    session, made = rollout(DeCoPruneHS(threshold=0.3, split=SPLIT, window=1))
    dynamic, static = session.cache.groups
    assert static.slots == 2 * TOKENS < dynamic.slots < CHUNKS * TOKENS
    assert all(bool(x.isfinite().all()) for x in made)


def test_patches_are_read_in_the_order_of_keys() -> None:
    adapted = AnyFlow(
        tiny_model(), height=SIDE, width=SIDE + 4, frames=FRAMES
    )  # 4 × 6 patches, so that axes differ
    x = torch.zeros(1, FRAMES, 4, SIDE, SIDE + 4)
    x[0, 1, :, 2:4, 6:8] = 1.0  # frame 1, patch row 1, patch column 3
    assert adapted.tokens(x).sum(-1).nonzero().tolist() == [[0, 24 + 6 + 3]]
    embed = adapted.model.patch_embedding
    embedded = embed(x.transpose(1, 2)) - embed(0 * x.transpose(1, 2))
    assert embedded.flatten(2).abs().sum(1).nonzero().tolist() == [[0, 24 + 6 + 3]]


def test_compressed_history_is_refused() -> None:
    session = PrunedSession(backbone(full_chunk_limit=2), Full(), batch=2)
    for _ in range(2):
        session.generate(text())
    with pytest.raises(PruneError, match="full_chunk_limit = 2"):
        session.generate(text())


def test_the_model_still_runs_without_a_pruned_history() -> None:
    own, adapted = tiny_model(), backbone().model
    x, t = (
        torch.randn(1, 4, 4, SIDE, SIDE, generator=torch.Generator().manual_seed(3)),
        torch.full((1, 4), 500.0),
    )
    with torch.no_grad():
        a, b = (
            model(x, t, t, text(1), [2, 2], return_dict=False)[0]
            for model in (own, adapted)
        )  # fmt: skip
    assert torch.equal(a, b)


def test_a_latent_that_is_no_whole_number_of_patches_is_refused() -> None:
    with pytest.raises(PruneError, match="no whole number of patches"):
        AnyFlow(tiny_model(), height=7, width=8, frames=FRAMES)
