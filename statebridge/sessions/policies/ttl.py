"""Time to live: a session that was not used for a while leaves the host, whether memory is short or not.

Under pressure another policy decides; by default the longest unused leaves first. The runtime looks for expired
sessions at the beginning of each of its calls; there is no thread that waits for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from statebridge.errors import ConfigError
from statebridge.sessions.policies.base import Policy, Refined, Resident
from statebridge.sessions.policies.lru import LRU


@dataclass
class TTL(Refined):
    """Keep what was used within the last `seconds`.

    Parameters
    ----------
    seconds
        How long an unused session stays on the host.
    """

    seconds: float
    then: Policy = field(default_factory=LRU, kw_only=True)

    def __post_init__(self) -> None:
        if not self.seconds >= 0:
            raise ConfigError(f"A time to live of {self.seconds} seconds is none; give 0 or more.")

    def due(self, sessions: Sequence[Resident], now: float, budget: int) -> Iterable[str]:
        expired = [session.id for session in sessions if now - session.used_at > self.seconds]
        return [*expired, *self.then.due(sessions, now, budget)]
