"""Chats that each leave an anchor, wander off, and come back to it; memory holds little more than the anchors.

A chat reads its text: that is its anchor. Then every chat forks drafts off its anchor and lets them read on, in
turns; drafts stay open, as an agent's do that never says when it is done with one. At the end every chat returns to
its anchor. It is kept when the anchor is still there and goes on exactly as one that never shared its memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from statebridge.errors import BudgetError, StoreError
from statebridge.sessions import SessionRuntime
from statebridge.sessions.policies import Policy

ROUNDS, DRAFT_TOKENS = 3, 4


def keep_anchors(
    model: Any, policy: Callable[[], Policy], texts: list[torch.Tensor], spare: int = 3
) -> dict[str, int]:
    """Anchors kept, anchors in all, and drafts that could not begin.

    Parameters
    ----------
    model
        A transformers model.
    policy
        Makes the policy.
    texts
        What each chat reads, int64 [1, T].
    spare
        Sessions that memory holds besides one anchor for every chat.
    """
    question = texts[0][:, :3]
    with_room = SessionRuntime(model, None, 1 << 40, 1 << 40)
    with_room.new("size")
    with_room.step(texts[0])
    size = with_room.active.after(torch.zeros(1, DRAFT_TOKENS, dtype=torch.int64))
    with_room.delete("size")
    calls = itertools.count()
    run = SessionRuntime(
        model,
        None,
        size,
        (len(texts) + spare) * size,
        policy(),
        may_lose=True,
        clock=lambda: float(next(calls)),
    )
    refused = 0
    for chat, text in enumerate(texts):
        for each in (with_room, run):
            try:
                each.new(f"anchor {chat}")
                each.mark(f"anchor {chat}", 1.0)
                each.step(text)
            except BudgetError:
                refused += 1
    for turn, chat in itertools.product(range(ROUNDS), range(len(texts))):
        try:
            run.fork(f"anchor {chat}", f"draft {chat} {turn}", switch=True)
            run.step(texts[(chat + turn + 1) % len(texts)][:, :DRAFT_TOKENS])
        except (BudgetError, StoreError):  # the anchor is gone, or the draft was refused
            refused += 1
    kept = 0
    for chat in range(len(texts)):
        with_room.switch(f"anchor {chat}")
        expected = with_room.step(question)
        try:
            run.switch(f"anchor {chat}")
        except StoreError:
            continue
        kept += torch.equal(run.step(question), expected)
    return {"kept": kept, "anchors": len(texts), "refused": refused}
