"""The planner's search on a tiny model: exact with room for all, exact with a disk, honest about what it lost."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import tiny
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.planner.anchors import keep_anchors  # noqa: E402
from experiments.planner.run import ROOMY, runtime  # noqa: E402
from experiments.planner.search import search  # noqa: E402
from statebridge.sessions import SessionStore  # noqa: E402
from statebridge.sessions.policies import LRU, Relevance  # noqa: E402

DEPTH, WIDTH = 4, 3
SIZE = 40_000  # bytes, more than a session here ever has


@pytest.fixture(scope="module")
def model():
    return tiny.build("qwen3_5")


@pytest.fixture(scope="module")
def prefix() -> torch.Tensor:
    return tiny.ids(1, 12, seed=3)


@pytest.fixture(scope="module")
def exact(model, prefix):
    return search(runtime(model, LRU(), ROOMY), prefix, depth=DEPTH, width=WIDTH)


def test_the_search_is_exact_when_nothing_is_lost(model, prefix, exact) -> None:
    """Against every path, scored by one forward pass; another schedule, so equal within float32 rounding."""
    ids, scores = prefix, torch.zeros(1)
    with torch.no_grad():
        for _ in range(DEPTH):  # [paths, T] grows by a token, and by WIDTH times as many paths
            gains, tokens = model(ids).logits[:, -1].log_softmax(-1).topk(WIDTH)
            ids = torch.cat((ids.repeat_interleave(WIDTH, 0), tokens.reshape(-1, 1)), dim=1)
            scores = scores.repeat_interleave(WIDTH) + gains.reshape(-1)
    best = int(scores.argmax())
    assert exact.path == tuple(ids[best, prefix.shape[1] :].tolist())
    assert exact.score == pytest.approx(float(scores[best]), abs=1e-4)
    assert len(scores) == WIDTH**DEPTH
    assert exact.lost == exact.refused == 0


@pytest.mark.parametrize("policy", [LRU, Relevance])
def test_a_disk_keeps_the_search_exact(model, prefix, exact, quick_path, policy) -> None:
    run = runtime(model, policy(), SIZE, 1, SessionStore(quick_path / "store", segment=8))
    assert search(run, prefix, depth=DEPTH, width=WIDTH, tidy=False) == exact
    assert run.usage().on_disk
    assert run.usage().host <= SIZE


def test_without_a_disk_branches_are_lost_and_counted(model, prefix, exact) -> None:
    found = {
        policy: search(runtime(model, policy(), SIZE, 1), prefix, depth=DEPTH, width=WIDTH, tidy=False)
        for policy in (LRU, Relevance)
    }
    for result in found.values():
        assert result.lost > 0
        assert result.score <= exact.score
        assert not set(result.continued) >= set(exact.continued)
    had = {policy: set(result.continued) & set(exact.continued) for policy, result in found.items()}
    assert len(had[Relevance]) >= len(had[LRU])


def test_a_tidy_search_leaves_nothing_behind_but_what_is_open(model, prefix, exact) -> None:
    sizes = {}
    for tidy in (False, True):
        run = runtime(model, LRU(), ROOMY)
        assert search(run, prefix, depth=DEPTH, width=WIDTH, tidy=tidy) == exact
        sizes[tidy] = len(run.usage().on_host)
    assert sizes[True] < sizes[False]


def test_anchors_outlive_drafts_by_relevance_and_not_by_age(model) -> None:
    texts = [tiny.ids(1, 12, seed=seed) for seed in range(5)]
    kept = {policy: keep_anchors(model, policy, texts)["kept"] for policy in (LRU, Relevance)}
    assert kept[Relevance] == 5
    assert kept[LRU] < 5
