"""Host memory and disk of a runtime: which sessions are where, who makes room, and what is safe to drop.

A session leaves memory in this order: its content is durable in the store, then its memory is given up. Whatever
fails on the way leaves it where it was. Bytes are asked of the sessions, never kept as a running sum. What an
eviction stored replaces what the eviction before it stored, so that a busy session does not fill the disk; what the
user asked for is kept. Knows policies and the store, nothing of what a session is.
"""

from __future__ import annotations

import contextlib

from statebridge.errors import BudgetError, ConfigError, StoreError
from statebridge.sessions.policies import Policy, Resident
from statebridge.sessions.runtime_records import EVICTED, Record, Records, label_of
from statebridge.sessions.store import SessionStore


class Memory(Records):
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
        if budget < 0:
            raise ConfigError(f"A host_budget of {budget} bytes holds nothing; give 0 or more.")
        super().__init__(store)
        self.budget, self.policy, self.may_lose = budget, policy, may_lose

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
        movable = [record for record in there if self.may_leave(record, seen[record.id])]
        moving = {record.id for record in movable}
        arrived = arriving.resident()
        if self.may_leave(arriving, arrived):
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
        # others share the store: what is there is not what was put there
        stored = not record.changed and not event and self.known(record.checkpoint) is not None
        if record.session is None or stored:
            if kept:
                record.kept = record.checkpoint
            return
        if not record.session.sound:
            raise StoreError(f"Session {record.id} is half written and was not stored; revert it.")
        label = label_of(record.id, event if kept else EVICTED)
        made = self.store.checkpoint(record.session, parent=self.known(record.kept), label=label)
        replaced = record.checkpoint if record.checkpoint != record.kept else None
        record.checkpoint, record.changed = made, False
        if kept:
            record.kept = made
        if replaced is not None:
            with contextlib.suppress(StoreError):  # it only takes up space
                self.store.delete(replaced)

    def may_leave(self, record: Record, resident: Resident) -> bool:
        """Whether neither the user nor the policy keeps a session in memory."""
        return not record.pinned and not self.policy.keeps(resident)

    def _no_room(self, arriving: Record, there: list[Record]) -> BudgetError:
        pinned = [r.id for r in (*there, arriving) if not self.may_leave(r, r.resident())]
        names = ", ".join(pinned[:5]) + (", …" if len(pinned) > 5 else "")
        return BudgetError(
            f"Session {arriving.id} needs {arriving.nbytes} of the {self.budget} bytes on the host, and those that "
            f"could make room are pinned ({names}); unpin one, or raise host_budget."
        )
