"""Predictive shrinking: move sessions out before memory is short, because a forecast says that it will be.

forecast = sum over sessions (bytes + horizon × growth). A baseline for experiments: it gives up sessions that would
have fitted, and whatever it saves is saved by eviction on demand as well.

Source: tried and dropped in the work on persistent computational state (docs/sessions.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from statebridge.sessions.policies.base import Policy, Refined, Resident
from statebridge.sessions.policies.lru import LRU


@dataclass
class PredictiveShrinking(Refined):
    """Keep what will still fit after `horizon` more uses of every session.

    Parameters
    ----------
    horizon
        Uses to look ahead.
    """

    horizon: float = 4.0
    then: Policy = field(default_factory=LRU, kw_only=True)

    def due(self, sessions: Sequence[Resident], now: float, budget: int) -> Iterable[str]:
        leaving = [*self.then.due(sessions, now, budget)]
        staying = [s for s in sessions if s.id not in leaving and not self.keeps(s)]
        forecast = sum(s.nbytes + self.horizon * s.growth for s in sessions if s.id not in leaving)
        for session in sorted(staying, key=self.value):
            if forecast <= budget:
                break
            forecast -= session.nbytes + self.horizon * session.growth
            leaving.append(session.id)
        return leaving
