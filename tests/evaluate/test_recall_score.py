"""Recall by depth: hits are greedy answers, and each arm answers from its own state."""

from __future__ import annotations

import pytest
import tiny_pair
import torch

from statebridge.bridge import Bridge, ModelPair
from statebridge.errors import ConfigError
from statebridge.evaluate import recall_score
from statebridge.evaluate.recall import RecallItem, RecallTask
from statebridge.evaluate.recall_score import answer, score_recall
from statebridge.evaluate.summary_run import wilson

TASK = RecallTask(
    tokenizer=tiny_pair.tokenizer(),
    filler=[document.text for document in tiny_pair.documents(2, 600)],
    length=130,
    depths=(110, 125),
    items_per_depth=3,
    distractors=2,
)


@pytest.fixture(scope="module")
def bridge() -> Bridge:
    pair = tiny_pair.pair()
    return Bridge.direct(pair.source_identity, pair.receiver_identity)


def written(model, ids: list[int], count: int) -> tuple[int, ...]:
    """Greedy continuation by whole passes, without any cache."""
    found = torch.tensor([ids])
    for _ in range(count):
        with torch.no_grad():
            found = torch.cat((found, model(input_ids=found).logits[:, -1:].argmax(-1)), dim=1)
    return tuple(found[0, len(ids) :].tolist())


@pytest.mark.parametrize("arm", ["native", "source", "empty"])
def test_hits_are_greedy_answers(bridge: Bridge, arm: str) -> None:
    """Items whose answer is what the model writes are hits, the same items with one other token are not."""
    pair = tiny_pair.pair()
    model = pair.source if arm == "source" else pair.receiver
    rows: list[RecallItem] = []
    for number, item in enumerate(list(TASK.items())[:3]):
        prefix = [] if arm == "empty" else list(item.prefix_ids)
        # different lengths, so that questions are padded
        asked = item.prompt_ids[number:]
        right = written(model, [*prefix, *asked], 3 + number)
        wrong = (*right[:-1], (right[-1] + 1) % 260)
        for ids in (right, wrong):
            rows.append(RecallItem(item.prefix_ids, asked, ids, item.depth, item.fact))
    assert answer(pair, rows, bridge=bridge)[arm] == [True, False] * 3


def test_self_bridge_answers_as_native(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy into the same model gives native's logits to the bit; the wrong donor gives others."""
    receiver = tiny_pair.pair().receiver
    same = ModelPair(receiver, receiver, tiny_pair.tokenizer())
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(recall_score, "greedy_match", lambda logits, item: seen.append(logits) or True)
    rows = list(TASK.items())[:2]
    arms = list(answer(same, rows, bridge=Bridge.direct(same.source_identity, same.receiver_identity)))
    logits = {arm: seen[2 * i] for i, arm in enumerate(arms)}
    assert torch.equal(logits["DDD"], logits["native"])
    assert not torch.allclose(logits["wrong donor"], logits["native"], atol=1e-3)


def test_no_item_is_its_own_donor(bridge: Bridge) -> None:
    """Four items in batches of three leave one over, which joins the batch before it."""
    pair = tiny_pair.pair()
    task = RecallTask(**{**TASK.__dict__, "depths": (110,), "items_per_depth": 4})
    hits = score_recall(pair, task, bridge=bridge, batch_size=3)
    assert set(hits) == {"native", "source", "DDD", "wrong donor", "empty"}
    assert all(len(found[110]) == 4 for found in hits.values())
    with pytest.raises(ConfigError, match="two items"):
        answer(pair, list(TASK.items())[:1], bridge=bridge)


def test_wilson_interval() -> None:
    """Against figures of Wilson's formula worked by hand for 20 items."""
    assert wilson(20, 20)["low"] == pytest.approx(20 / (20 + 1.959963984540054**2))
    assert wilson(20, 20)["high"] == 1
    assert wilson(0, 20)["low"] == 0
    half = wilson(10, 20)
    assert half["estimate"] == 0.5
    assert half["high"] - 0.5 == pytest.approx(0.5 - half["low"]) == pytest.approx(0.2007, abs=1e-4)
