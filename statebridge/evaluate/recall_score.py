"""Recall by depth: can the receiver answer questions about facts that only the source has read?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from statebridge.bridge import Bridge, ModelPair
from statebridge.capture import continue_from, prefill
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
        Plans besides the bridge's own.
    batch_size
        Items whose prefixes are read together (at least 2, each being another's wrong donor).

    Returns
    -------
    dict
        Arm (native, source, each plan, wrong donor, empty) -> depth -> one hit or miss per item.
    """
    hits: dict[str, dict[int, list[bool]]] = {}
    items = list(task.items())
    plans = list(dict.fromkeys((bridge.config.plan, *plans)))
    with torch.inference_mode():
        for start in range(0, len(items), batch_size):
            rows = items[start : start + batch_size]
            prefix = torch.tensor([row.prefix_ids for row in rows])
            source = prefill(pair.source, prefix).state()
            states = {"native": (pair.receiver, prefill(pair.receiver, prefix).state())}
            states["source"] = (pair.source, source)
            states |= {plan: (pair.receiver, bridge.with_plan(plan)(source)) for plan in plans}
            donors = torch.arange(len(rows)).roll(1)
            states["wrong donor"] = (pair.receiver, bridge(source.select(donors)))
            asked, lengths = _padded(rows)
            for arm, (model, state) in states.items():
                logits = continue_from(model, state, asked).logits
                _note(hits, arm, rows, [logits[i, :n] for i, n in enumerate(lengths)])
            # without a prefix, the question is all there is
            alone = [_alone(pair, row) for row in rows]
            _note(hits, "empty", rows, alone)
    return hits


def _padded(rows: Sequence[RecallItem]) -> tuple[torch.Tensor, list[int]]:
    """Questions with their answers [B, N]; padding to the right changes nothing before it."""
    ids = [[*row.prompt_ids, *row.answer_ids] for row in rows]
    longest = max(map(len, ids))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in ids]), [len(row) for row in ids]


def _alone(pair: ModelPair, row: RecallItem) -> torch.Tensor:
    first = prefill(pair.receiver, torch.tensor([row.prompt_ids[:1]]))
    rest = torch.tensor([[*row.prompt_ids[1:], *row.answer_ids]])
    return torch.cat((first.logits, continue_from(pair.receiver, first, rest).logits), dim=1)[0]


def _note(
    hits: dict[str, dict[int, list[bool]]], arm: str, rows: Sequence[RecallItem], logits: list[torch.Tensor]
) -> None:
    for row, found in zip(rows, logits, strict=True):
        hits.setdefault(arm, {}).setdefault(row.depth, []).append(greedy_match(found, row))
