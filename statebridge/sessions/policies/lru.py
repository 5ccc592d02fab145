"""Least recently used: the session that has waited longest leaves first.

value = turn of the last use. The baseline of every cache, and wrong where the oldest session is the one that all
others return to.
"""

from __future__ import annotations

from dataclasses import dataclass

from statebridge.sessions.policies.base import Policy, Resident


@dataclass
class LRU(Policy):
    """Keep what was used last."""

    def value(self, session: Resident) -> tuple[float, ...]:
        return (session.turn,)
