"""Greedy dual size: large sessions leave first, unless they were used lately.

value = L + cost / bytes, set at every use; L rises to the value of each session that leaves, so that those not used
since lose against newcomers. With cost 1 it keeps as many sessions as it can; with the cost of bringing one back
(proportional to its bytes) it becomes LRU.

Source: Cao and Irani, Cost-aware WWW proxy caching algorithms, USITS 1997.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from statebridge.sessions.policies.base import Policy, Resident


def _one(session: Resident) -> float:
    return 1.0


@dataclass
class GreedyDualSize(Policy):
    """Keep what is cheap to hold.

    Parameters
    ----------
    cost
        What it costs to bring a session back, in any unit.
    """

    cost: Callable[[Resident], float] = _one
    _level: float = field(default=0.0, init=False)
    _values: dict[str, float] = field(default_factory=dict, init=False)

    def value(self, session: Resident) -> tuple[float, ...]:
        if session.id not in self._values:
            self.used(session)
        return (self._values[session.id], session.turn)

    def used(self, session: Resident) -> None:
        self._values[session.id] = self._level + self.cost(session) / max(session.nbytes, 1)

    def left(self, session: Resident) -> None:
        self._level = max(self._level, self._values.pop(session.id, self._level))

    def forgot(self, session: Resident) -> None:
        self._values.pop(session.id, None)
