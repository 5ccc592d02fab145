"""Host memory and disk of a runtime: which sessions are where, who makes room, and what is safe to drop.

A session leaves memory in this order: its content is durable in the store, then its memory is given up. Whatever
fails on the way leaves it where it was. Bytes are asked of the sessions, never kept as a running sum. What an
eviction stored replaces what the eviction before it stored, so that a busy session does not fill the disk; what the
user asked for is kept. Knows policies and the store, nothing of what a session is.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from statebridge.errors import BudgetError, StoreError
from statebridge.sessions.policies import Policy, Resident
from statebridge.sessions.runtime_protocol import RunningSession
from statebridge.sessions.store import SessionStore


@dataclass
class Record:
    """A session of a runtime and where it is.

    Attributes
    ----------
    id
        Its name.
    session
        The session in memory; None when it is on disk or lost.
    checkpoint
        Latest checkpoint of this session; None without.
    kept
        Latest checkpoint of its line that was asked for: the parent of the next one.
    changed
        Whether it differs from `checkpoint`.
    broken
        A step failed after it had begun to write.
    nbytes
        Bytes in memory when it was last moved or used; at rest nothing changes them.
    pinned, relevance, turn, used_at, growth
        What policies see (`Resident`).
    """

    id: str
    session: RunningSession | None = None
    checkpoint: str | None = None
    kept: str | None = None
    changed: bool = True
    broken: bool = False
    nbytes: int = 0
    pinned: bool = False
    relevance: float = 0.0
    turn: int = 0
    used_at: float = 0.0
    growth: float = 0.0

    @property
    def lost(self) -> bool:
        """Whether nothing of it is left."""
        return self.session is None and self.checkpoint is None

    def resident(self) -> Resident:
        """What a policy sees of it."""
        return Resident(self.id, self.nbytes, self.turn, self.used_at, self.relevance, self.growth)

    def measure(self) -> int:
        """Ask the session for its bytes; 0 without one."""
        self.nbytes = 0 if self.session is None else self.session.nbytes()
        return self.nbytes


class Memory:
    """Records of all sessions, with room made on the host by a policy.

    Parameters
    ----------
    store
        Where sessions go that leave memory; None when there is no disk.
    budget
        Bytes that sessions may hold on the host.
    policy
        Who leaves first.
    may_lose
        Without a store: give up sessions that must leave, instead of failing.
    """

    def __init__(self, store: SessionStore | None, budget: int, policy: Policy, may_lose: bool) -> None:
        self.store, self.budget, self.policy, self.may_lose = store, budget, policy, may_lose
        self.records: dict[str, Record] = {}
        self.active: Record | None = None  # on the device, the only one

    def on_host(self) -> list[Record]:
        """Sessions in memory and off the device."""
        return [r for r in self.records.values() if r.session is not None and r is not self.active]

    def make_room(self, arriving: Record, leaving: Record | None = None) -> bool:
        """Move sessions out until `arriving` fits on the host, or say that it must go to disk itself.

        Parameters
        ----------
        arriving
            The session that needs room for its `nbytes`; it is a candidate like those that are there.
        leaving
            A session on the host that is about to go onto the device, and needs no room any more.

        Returns
        -------
        bool
            Whether there is room; if not, the policy wants `arriving` itself to leave.

        Raises
        ------
        BudgetError
            When everything that could leave is pinned; nothing has moved then.
        """
        there = [record for record in self.on_host() if record is not leaving and record is not arriving]
        seen = {record.id: record.resident() for record in there}
        excess = sum(record.nbytes for record in there) + arriving.nbytes - self.budget
        if excess <= 0:
            return True
        movable = [record for record in there if self._may_leave(record, seen[record.id])]
        moving = {record.id for record in movable}
        arrived = arriving.resident()
        if self._may_leave(arriving, arrived):
            fixed = sum(record.nbytes for record in there if record.id not in moving)
            if fixed + arriving.nbytes > self.budget:
                return False
            seen[arriving.id] = arrived
            movable.append(arriving)
        victims: list[Record] = []
        for record in sorted(movable, key=lambda record: self.policy.value(seen[record.id])):
            if excess <= 0:
                break
            victims.append(record)
            excess -= record.nbytes
        if excess > 0:
            raise self._no_room(arriving, there)
        for record in victims:
            if record is not arriving:
                self.evict(record)
        return arriving not in victims

    def evict(self, record: Record) -> None:
        """Make a session durable, then give up its memory.

        Raises
        ------
        BudgetError
            When there is no store to take it, and it may not be lost.
        StoreError
            When the store cannot take it; it is where it was.
        """
        if not record.broken:  # half written: what was stored before it is all there is
            self.save(record, kept=False)
        self.policy.left(record.resident())
        self.drop(record)

    def drop(self, record: Record) -> None:
        """Give up the memory of a session."""
        self.policy.forgot(record.resident())
        record.session = None
        record.nbytes = 0
        if record is self.active:
            self.active = None

    def save(self, record: Record, *, kept: bool, event: str = "") -> None:
        """Store a session that has changed; `kept` when the checkpoint was asked for."""
        if self.store is None:
            if self.may_lose and not kept:
                return
            raise BudgetError(
                f"Session {record.id} cannot leave memory: the runtime has no store; give it one, or more memory."
            )
        if record.session is None or (not record.changed and record.checkpoint is not None and not event):
            if kept:
                record.kept = record.checkpoint
            return
        if not record.session.sound:
            raise StoreError(f"Session {record.id} is half written and was not stored; revert it.")
        label = f"{record.id} | {event}" if event else record.id
        made = self.store.checkpoint(record.session, parent=self._known(record.kept), label=label)
        replaced = record.checkpoint if record.checkpoint != record.kept else None
        record.checkpoint, record.changed = made, False
        if kept:
            record.kept = made
        if replaced is not None:
            with contextlib.suppress(StoreError):  # it only takes up space
                self.store.delete(replaced)

    def _known(self, identifier: str | None) -> str | None:
        """The checkpoint as a parent, unless somebody has deleted it since."""
        if identifier is None or self.store is None:
            return None
        try:
            self.store.manifest(identifier)
        except StoreError:
            return None
        return identifier

    def _may_leave(self, record: Record, resident: Resident) -> bool:
        return not record.pinned and not self.policy.keeps(resident)

    def _no_room(self, arriving: Record, there: list[Record]) -> BudgetError:
        pinned = [r.id for r in (*there, arriving) if not self._may_leave(r, r.resident())]
        names = ", ".join(pinned[:5]) + (", …" if len(pinned) > 5 else "")
        return BudgetError(
            f"Session {arriving.id} needs {arriving.nbytes} of the {self.budget} bytes on the host, and those that "
            f"could make room are pinned ({names}); unpin one, or raise host_budget."
        )
