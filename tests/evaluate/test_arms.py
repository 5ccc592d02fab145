"""Arms against the models themselves: each is scored on the right tokens, from the right state."""

from __future__ import annotations

import pytest
import tiny_pair
import torch

from statebridge.bridge import Bridge, token_windows
from statebridge.errors import DocumentError
from statebridge.evaluate.arms import Protocol, arm_logits, score_arms

PROTOCOL = Protocol(prefix=70, targets=6)
CONTROLS = ("source", "empty", "restore", "kv only", "gdn only", "wrong donor")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    windows = token_windows(tiny_pair.documents(3), tiny_pair.tokenizer(), PROTOCOL.length, 3)
    return torch.stack([window.ids for window in windows])


@pytest.fixture(scope="module")
def bridge() -> Bridge:
    pair = tiny_pair.pair()
    return Bridge.direct(pair.source_identity, pair.receiver_identity)


@pytest.fixture(scope="module")
def logits(ids: torch.Tensor, bridge: Bridge) -> dict[str, torch.Tensor]:
    options = {"windows": (1, 16), "handover_windows": (16,), "controls": CONTROLS}
    return dict(arm_logits(tiny_pair.pair(), ids, PROTOCOL, bridge=bridge, **options))


def whole(model, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the scored positions from one pass over `ids`, without any state."""
    with torch.no_grad():
        return model(input_ids=ids[:, :-1]).logits[:, -PROTOCOL.targets :]


def test_reading_arms_equal_one_pass(ids: torch.Tensor, logits: dict[str, torch.Tensor]) -> None:
    """Tolerance: one pass is another schedule than prefix and rest."""
    pair = tiny_pair.pair()
    start = {"native": 0, "empty": 70, "window 1": 69, "window 16": 54}
    for arm, first in start.items():
        torch.testing.assert_close(logits[arm], whole(pair.receiver, ids[:, first:]), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(logits["source"], whole(pair.source, ids), atol=1e-3, rtol=1e-3)


def test_restore_is_native_to_the_bit(logits: dict[str, torch.Tensor]) -> None:
    assert torch.equal(logits["restore"], logits["native"])


def test_arms_differ(logits: dict[str, torch.Tensor]) -> None:
    arms = [arm for arm in logits if arm != "restore"]
    for i, arm in enumerate(arms):
        for other in arms[i + 1 :]:
            assert (logits[arm] - logits[other]).abs().max() > 1e-2, (arm, other)


def test_self_bridge_recovers_native(ids: torch.Tensor) -> None:
    """Copying every component into the same model is the native arm; the wrong donor is not."""
    pair = tiny_pair.pair()
    same = type(pair)(pair.receiver, pair.receiver, pair.tokenizer)
    bridge = Bridge.direct(same.source_identity, same.receiver_identity)
    found = score_arms(same, ids, PROTOCOL, bridge=bridge, controls=("wrong donor",))
    assert torch.equal(found["DDD"].nll, found["native"].nll)
    assert found["DDD"].top1.min() == 1
    assert found["wrong donor"].kl.mean() > 1e-3


def test_wrong_donor_is_the_neighbour(
    ids: torch.Tensor, bridge: Bridge, logits: dict[str, torch.Tensor]
) -> None:
    mixed = torch.cat((ids.roll(1, 0)[:, : PROTOCOL.prefix], ids[:, PROTOCOL.prefix :]), dim=1)
    again = dict(arm_logits(tiny_pair.pair(), mixed, PROTOCOL, bridge=bridge, controls=()))
    torch.testing.assert_close(again["DDD"], logits["wrong donor"], atol=1e-4, rtol=1e-4)


def test_nll_is_of_the_true_tokens(
    ids: torch.Tensor, bridge: Bridge, logits: dict[str, torch.Tensor]
) -> None:
    scores = score_arms(tiny_pair.pair(), ids, PROTOCOL, bridge=bridge, controls=())
    targets = ids[:, PROTOCOL.prefix + 1 :]
    for position in range(PROTOCOL.targets):
        expected = torch.nn.functional.cross_entropy(
            logits["DDD"][:, position], targets[:, position], reduction="none"
        )
        torch.testing.assert_close(scores["DDD"].nll[:, position], expected)


def test_wrong_length_is_refused(bridge: Bridge, ids: torch.Tensor) -> None:
    with pytest.raises(DocumentError, match="77 tokens"):
        score_arms(tiny_pair.pair(), ids[:, :-1], PROTOCOL, bridge=bridge)
