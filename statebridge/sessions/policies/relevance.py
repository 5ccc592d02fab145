"""Relevance: keep the sessions that others will return to, however long ago they were used.

value = (relevance, turn). Relevance is what the caller marked a session with (`SessionRuntime.mark`): anchors of a
search, the root of a conversation's forks; or what a scorer says. Sessions of one relevance leave by LRU.

Source: the eviction keyed by relevance of persistent computational state (docs/sessions.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from statebridge.sessions.policies.base import Policy, Resident, checked_relevance


@dataclass
class Relevance(Policy):
    """Keep anchors.

    Parameters
    ----------
    scorer
        Relevance of a session, in place of its mark.
    """

    scorer: Callable[[Resident], float] | None = None

    def value(self, session: Resident) -> tuple[float, ...]:
        relevance = session.relevance if self.scorer is None else self.scorer(session)
        return (checked_relevance(session.id, relevance), session.turn)
