"""Free-running generation: what an arm writes is what its model writes, and luck is common to all arms."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
import pytest
import tiny_pair
import torch

from statebridge.bridge import Bridge, ModelPair, TokenWindow, token_windows
from statebridge.evaluate.arms import Protocol
from statebridge.evaluate.config import GenerationConfig
from statebridge.evaluate.generation import _Sampler, generation_table
from statebridge.evaluate.summary_run import _generation
from statebridge.stats import Bootstrap

PROTOCOL = Protocol(prefix=50, targets=3)
CONFIG = GenerationConfig(documents=3, new_tokens=5)


@pytest.fixture(scope="module")
def windows() -> list[TokenWindow]:
    return token_windows(tiny_pair.documents(3), tiny_pair.tokenizer(), PROTOCOL.length, 3)


def tokens(pair: ModelPair, windows, seed: int = 0) -> dict[tuple[str, str], dict[str, list[int]]]:
    bridge = Bridge.direct(pair.source_identity, pair.receiver_identity)
    table = generation_table(pair, windows, PROTOCOL, CONFIG, bridge=bridge, seed=seed)
    found: dict[tuple[str, str], dict[str, list[int]]] = {}
    for row in table.to_pylist():
        assert row["text"] == pair.tokenizer.decode(row["tokens"])
        found.setdefault((row["mode"], row["arm"]), {})[row["document"]] = row["tokens"]
    return found


@pytest.fixture(scope="module")
def written(windows):
    return tokens(tiny_pair.pair(), windows)


@pytest.mark.parametrize(("arm", "first"), [("native", 0), ("source", 0), ("empty", 50)])
def test_greedy_is_what_the_model_writes(written, windows, arm: str, first: int) -> None:
    """Against the naive twin: one whole pass per token, without any cache."""
    pair = tiny_pair.pair()
    model = pair.source if arm == "source" else pair.receiver
    ids = torch.stack([w.ids for w in windows])[:, first : PROTOCOL.prefix + 1]
    for _ in range(CONFIG.new_tokens):
        with torch.no_grad():
            following = model(input_ids=ids).logits[:, -1].argmax(-1)
        ids = torch.cat((ids, following[:, None]), dim=1)
    assert list(written["greedy", arm].values()) == ids[:, -CONFIG.new_tokens :].tolist()


def test_same_state_draws_the_same_tokens(windows) -> None:
    """A copy into the same model is native to the bit, so sampling must agree too; another seed must not."""
    receiver = tiny_pair.pair().receiver
    same = ModelPair(receiver, receiver, tiny_pair.tokenizer())
    found = tokens(same, windows)
    assert found["sampled", "DDD"] == found["sampled", "native"] != found["greedy", "native"]
    assert found["sampled", "wrong donor"] != found["sampled", "native"]
    assert tokens(same, windows, seed=1)["sampled", "native"] != found["sampled", "native"]


def test_randomness_belongs_to_the_document(written, windows) -> None:
    """Whatever else is in the batch, a document draws the same; documents draw differently."""
    again = tokens(tiny_pair.pair(), windows[:2])
    for arm in ("native", "DDD", "empty"):
        for window in windows[:2]:
            assert again["sampled", arm][window.id] == written["sampled", arm][window.id]
    twins = [dataclasses.replace(windows[0], id=name) for name in ("a", "b")]
    drawn = tokens(tiny_pair.pair(), twins)["sampled", "native"]
    assert drawn["a"] != drawn["b"]


def test_samples_follow_the_softmax() -> None:
    """10,000 draws; tolerance 0.02 is four standard errors of a share."""
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    sampler = _Sampler(["a"], seed=0, temperature=0.7)
    drawn = torch.stack([sampler(logits) for _ in range(10_000)])
    shares = torch.bincount(drawn.flatten(), minlength=3) / 10_000
    torch.testing.assert_close(shares, torch.softmax(logits[0] / 0.7, -1), atol=0.02, rtol=0)


def test_divergence_and_agreement() -> None:
    rows = {
        "native": [[1, 2, 3, 4], [5, 6, 7, 8]],
        "DDD": [[1, 2, 9, 4], [5, 6, 7, 8]],
        "empty": [[0, 2, 3, 4], [0, 0, 0, 0]],
    }
    table = pa.Table.from_pylist(
        [
            {"document": f"d{i}", "mode": "greedy", "arm": arm, "tokens": row, "text": ""}
            # documents stand in another order in each arm
            for arm, found in rows.items()
            for i, row in (reversed if arm == "empty" else list)(list(enumerate(found)))
        ]
    )
    found = _generation(table, Bootstrap(0, 50))["greedy"]
    assert "native" not in found
    assert found["DDD"]["divergence"]["estimate"] == (2 + 4) / 2
    assert found["DDD"]["agreement"]["estimate"] == (3 / 4 + 1) / 2
    assert (found["DDD"]["identical"], found["empty"]["identical"]) == (1, 0)
    assert found["empty"]["divergence"]["estimate"] == 0
    assert found["empty"]["agreement"]["estimate"] == 3 / 8
