"""Predictive admission: refuse a new session when a forecast says that memory will be short.

forecast = max(new bytes, mean bytes of a session) + sum over sessions (bytes + horizon × growth). A baseline for
experiments: what it refuses could have been served, because the runtime moves sessions out on demand.

Source: tried and dropped in the work on persistent computational state (docs/sessions.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from statebridge.sessions.policies.base import Policy, Refined, Resident
from statebridge.sessions.policies.lru import LRU


@dataclass
class PredictiveAdmission(Refined):
    """Admit what will still fit after `horizon` more uses of every session.

    Parameters
    ----------
    horizon
        Uses to look ahead.
    """

    horizon: float = 4.0
    then: Policy = field(default_factory=LRU, kw_only=True)

    def refuses(self, sessions: Sequence[Resident], nbytes: int, budget: int) -> str:
        usual = sum(s.nbytes for s in sessions) / max(len(sessions), 1)
        forecast = max(nbytes, usual) + sum(s.nbytes + self.horizon * s.growth for s in sessions)
        if forecast > budget:
            return f"{forecast:.0f} bytes are predicted, and the budget is {budget}"
        return self.then.refuses(sessions, nbytes, budget)
