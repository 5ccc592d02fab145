"""What an eviction policy is: a value for every session in memory; the least valuable leaves first.

A policy sees facts about sessions, never the sessions, and it moves nothing: the runtime asks it when memory is
short. To add one, write a file with a dataclass that overrides `value`; the other hooks are for policies that keep
notes, act before memory is short, or refuse newcomers. Values are tuples, compared from the left, so that ties
of the first part are settled by the next; the last part should be `turn`, which no two sessions share.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from statebridge.errors import ConfigError


@dataclass(frozen=True)
class Resident:
    """What a policy sees of a session.

    Attributes
    ----------
    id
        Its name in the runtime.
    nbytes
        Bytes that it holds.
    turn
        When it was last used, as a count of uses of all sessions.
    used_at
        When it was last used, in seconds of the runtime's clock.
    relevance
        What the caller marked it with; 0 without a mark.
    growth
        Bytes that a use adds, as an average in which the latest use weighs half.
    """

    id: str
    nbytes: int
    turn: int
    used_at: float
    relevance: float = 0.0
    growth: float = 0.0


def checked_relevance(id: str, relevance: float) -> float:
    """A session's relevance; what is no number has no place in an order, and would let anyone leave."""
    if math.isnan(relevance):
        raise ConfigError(f"The relevance of {id} is nan; give a number, which may be infinite.")
    return relevance


class Policy(ABC):
    """Says which session leaves memory first."""

    @abstractmethod
    def value(self, session: Resident) -> tuple[float, ...]:
        """What keeping a session in memory is worth."""

    def keeps(self, session: Resident) -> bool:
        """Whether the session must stay, whatever it is worth."""
        return False

    def used(self, session: Resident) -> None:
        """A session was made, stepped or brought back."""
        return

    def left(self, session: Resident) -> None:
        """A session left memory because the policy said so."""
        return

    def forgot(self, session: Resident) -> None:
        """A session was closed, deleted or reverted; its notes can go."""
        return

    def due(self, sessions: Sequence[Resident], now: float, budget: int) -> Iterable[str]:
        """Ids of sessions on the host that shall leave although memory is not short."""
        return ()

    def refuses(self, sessions: Sequence[Resident], nbytes: int, budget: int) -> str:
        """Why a new session of `nbytes` beside `sessions` is refused; "" when it is not."""
        return ""


@dataclass
class Refined(Policy):
    """Another policy with some hooks changed.

    Parameters
    ----------
    then
        The policy that decides everything else.
    """

    then: Policy = field(kw_only=True)

    def value(self, session: Resident) -> tuple[float, ...]:
        return self.then.value(session)

    def keeps(self, session: Resident) -> bool:
        return self.then.keeps(session)

    def used(self, session: Resident) -> None:
        self.then.used(session)

    def left(self, session: Resident) -> None:
        self.then.left(session)

    def forgot(self, session: Resident) -> None:
        self.then.forgot(session)

    def due(self, sessions: Sequence[Resident], now: float, budget: int) -> Iterable[str]:
        return self.then.due(sessions, now, budget)

    def refuses(self, sessions: Sequence[Resident], nbytes: int, budget: int) -> str:
        return self.then.refuses(sessions, nbytes, budget)
