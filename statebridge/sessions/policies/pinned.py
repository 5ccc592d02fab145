"""Pinned by rule: sessions that a rule names never leave; another policy decides among the rest.

Harder than relevance: where the rule names more than the budget holds, calls fail and say so. Single sessions are
pinned with `SessionRuntime.pin`, under any policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from statebridge.sessions.policies.base import Policy, Refined, Resident
from statebridge.sessions.policies.lru import LRU


@dataclass
class Pinned(Refined):
    """Keep what the rule names.

    Parameters
    ----------
    rule
        Whether a session must stay.
    """

    rule: Callable[[Resident], bool]
    then: Policy = field(default_factory=LRU, kw_only=True)

    def keeps(self, session: Resident) -> bool:
        return self.rule(session) or self.then.keeps(session)
