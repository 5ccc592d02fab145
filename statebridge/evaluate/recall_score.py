"""Recall by depth: can the receiver answer questions about facts that only the source has read?

An item counts as recalled when greedy decoding would give exactly the answer, told from one teacher-forced pass
over question and answer. Knows the task and the models; what the facts are is the task's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from statebridge.bridge import Bridge, ModelPair
from statebridge.capture import continue_from, prefill
from statebridge.errors import ConfigError
from statebridge.evaluate.arms import batches, handovers
from statebridge.evaluate.recall import RecallItem, RecallTask, greedy_match


def score_recall(
    pair: ModelPair,
    task: RecallTask,
    *,
    bridge: Bridge,
    plans: Sequence[str] = (),
    batch_size: int = 4,
) -> dict[str, dict[int, list[bool]]]:
    """Exact match of every item under every arm.

    Parameters
    ----------
    pair, bridge
        The models and their bridge.
    task
        The items.
    plans
        Plans besides the hand-over.
    batch_size
        Items whose prefixes are read together (at least 2, each being another's wrong donor).

    Returns
    -------
    dict
        Arm (native, source, each hand-over, wrong donor, empty) -> depth -> one hit or miss per item.
    """
    hits: dict[str, dict[int, list[bool]]] = {}
    items = list(task.items())
    for first, last in batches(len(items), batch_size):
        rows = items[first:last]
        for arm, found in answer(pair, rows, bridge=bridge, plans=plans).items():
            for row, hit in zip(rows, found, strict=True):
                hits.setdefault(arm, {}).setdefault(row.depth, []).append(hit)
    return hits


def answer(
    pair: ModelPair, rows: Sequence[RecallItem], *, bridge: Bridge, plans: Sequence[str] = ()
) -> dict[str, list[bool]]:
    """Arm -> hit or miss of every item of one batch; see `score_recall`.

    Raises
    ------
    ConfigError
        When there is one item only, whose wrong donor would be itself.
    """
    if len(rows) < 2:
        raise ConfigError("Recall needs at least two items in a batch: each is another's wrong donor.")
    prefix = torch.tensor([row.prefix_ids for row in rows])
    with torch.inference_mode():
        source = prefill(pair.source, prefix).state()
        bridges = handovers(bridge, plans)
        states = {"native": (pair.receiver, prefill(pair.receiver, prefix).state())}
        states["source"] = (pair.source, source)
        states |= {arm: (pair.receiver, its_bridge(source)) for arm, its_bridge in bridges.items()}
        donors = torch.arange(len(rows)).roll(1)
        states["wrong donor"] = (pair.receiver, bridge(source.select(donors)))
        asked = _padded(rows)
        hits: dict[str, list[bool]] = {}
        for arm, (model, state) in states.items():
            logits = continue_from(model, state, asked).logits
            hits[arm] = [greedy_match(found, row) for found, row in zip(logits, rows, strict=True)]
        # without a prefix, the question is all there is
        hits["empty"] = [greedy_match(_alone(pair, row), row) for row in rows]
    return hits


def _padded(rows: Sequence[RecallItem]) -> torch.Tensor:
    """Questions with their answers [B, N]; padding to the right changes nothing before it."""
    ids = [[*row.prompt_ids, *row.answer_ids] for row in rows]
    longest = max(map(len, ids))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids])


def _alone(pair: ModelPair, row: RecallItem) -> torch.Tensor:
    first = prefill(pair.receiver, torch.tensor([row.prompt_ids[:1]]))
    rest = torch.tensor([[*row.prompt_ids[1:], *row.answer_ids]])
    return torch.cat((first.logits, continue_from(pair.receiver, first, rest).logits), dim=1)[0]
