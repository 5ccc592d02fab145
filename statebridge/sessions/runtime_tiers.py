"""The device above host and disk: which session is active, how the next one takes its place, and who is asked for.

A change of the active session reads the next one first, makes room for the last one, takes that off the device, and
puts the next one onto it. An error at any of these leaves every session where it can be found: on the device, on the
host, or in the store. Knows sessions by their protocol only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from statebridge.errors import BudgetError, StatebridgeError, StoreError
from statebridge.sessions.index import Checkpoint
from statebridge.sessions.policies import Policy
from statebridge.sessions.runtime_memory import Memory, Record
from statebridge.sessions.runtime_protocol import Engine, RunningSession
from statebridge.sessions.store import SessionStore


@dataclass(frozen=True)
class Usage:
    """Where sessions are, and the bytes that they hold on the device and on the host."""

    device: int
    host: int
    active: str | None
    on_host: tuple[str, ...]
    on_disk: tuple[str, ...]
    lost: tuple[str, ...]


class Tiers(Memory):
    """Device, host and disk of one runtime.

    Parameters
    ----------
    engine
        Makes sessions.
    store, host_budget, policy, may_lose
        As in `Memory`.
    device_budget
        Bytes that the active session may hold.
    clock
        Seconds.
    """

    def __init__(
        self,
        engine: Engine,
        store: SessionStore | None,
        device_budget: int,
        host_budget: int,
        policy: Policy,
        may_lose: bool,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(store, host_budget, policy, may_lose)
        self.engine, self.device_budget, self.clock = engine, device_budget, clock
        self._turn = 0

    # finding

    def new_record(self, name: str) -> Record:
        """A record of an unused name, not yet among the others.

        Raises
        ------
        StoreError
            When the name is empty, too long, not printable, holds the mark that labels use, or is taken.
        """
        if not (0 < len(name) <= 100 and name.isprintable() and " | " not in name):
            raise StoreError(
                f"{name[:40]!r} is no session name; use up to 100 printable characters without ' | '."
            )
        if name in self.records:
            raise StoreError(f"A session named {name} is open already; switch to it, or choose another name.")
        return Record(name)

    def find(self, id: str | None, *, sound: bool = True) -> Record:
        """The record of a session, None for the active one; `sound` when it must be of use."""
        if id is None:
            if self.active is None:
                raise StoreError("No session is on the device; begin one with new, or switch to one.")
            record = self.active
        elif id in self.records:
            record = self.records[id]
        else:
            raise StoreError(
                f"The runtime has no session {id}; open it from the store, or begin it with new."
            )
        if sound and record.broken:
            raise StoreError(
                f"Session {record.id} failed in the middle of a step and is half written; revert it to its latest "
                "checkpoint, or delete it."
            )
        if sound and record.lost:
            raise StoreError(f"Session {record.id} was given up when memory was short; begin it again.")
        return record

    def able(self, record: Record, verb: str) -> Callable[..., Any]:
        """The method of a session in memory that does `verb`."""
        method: Callable[..., Any] | None = getattr(record.session, verb, None)
        if method is None:
            raise StatebridgeError(f"Session {record.id} is of a kind that cannot {verb}; use step.")
        return method

    def stored(self, name: str) -> list[Checkpoint]:
        """Checkpoints in the store that carry the name of a session."""
        if self.store is None:
            return []
        return [c for c in self.store.list() if c.label.partition(" | ")[0] == name]

    def usage(self) -> Usage:
        """Bytes that are held now, asked of every session, and who is where."""
        records, resting = self.records.values(), self.on_host()
        return Usage(
            device=0 if self.active is None else self.active.measure(),
            host=sum(record.measure() for record in resting),
            active=None if self.active is None else self.active.id,
            on_host=tuple(record.id for record in resting),
            on_disk=tuple(r.id for r in records if r.session is None and r.checkpoint is not None),
            lost=tuple(record.id for record in records if record.lost),
        )

    # what is allowed

    def admit(self, session: RunningSession) -> None:
        """Raise `BudgetError` when the policy refuses a new session."""
        residents = [record.resident() for record in self.records.values() if record.session is not None]
        budget = self.budget + self.device_budget
        if reason := self.policy.refuses(residents, session.nbytes(), budget):
            raise BudgetError(
                f"The policy refuses another session: {reason}; close one, or raise host_budget."
            )

    def require_device(self, record: Record, nbytes: int) -> None:
        """Raise `BudgetError` when a session would not fit on the device."""
        if nbytes > self.device_budget:
            raise BudgetError(
                f"Session {record.id} needs {nbytes} bytes on the device, and the budget is {self.device_budget}; "
                "raise device_budget, or go on with a shorter session."
            )

    # moving

    def expire(self) -> None:
        """Move those out that the policy wants out although memory is not short."""
        movable = {record.id: record for record in self.on_host() if not record.pinned}
        residents = [record.resident() for record in movable.values()]
        for id in self.policy.due(residents, self.clock(), self.budget):
            record = movable[id]
            if record.session is not None and not self.policy.keeps(record.resident()):
                self.evict(record)

    def used(self, record: Record) -> None:
        """Note that a session was made, stepped or brought back."""
        self._turn += 1
        record.turn, record.used_at = self._turn, self.clock()
        record.measure()
        self.policy.used(record.resident())

    def activate(self, record: Record | None) -> None:
        """Put a session onto the device in place of the one that is there; None for no session."""
        leaving = self.active
        if record is leaving:
            return
        if record is None:
            self._rest(leaving, None)
            return
        session, came_from_disk = record.session, record.session is None
        if session is None:
            session = self._loaded(record)
        self.require_device(record, session.nbytes())
        self._rest(leaving, record)
        record.session = session
        try:
            session.prepare()
        except BaseException:
            # what came from disk is still there; what came from the host may find its place taken
            if came_from_disk:
                record.session = None
            elif record.id in self.records and not self.make_room(record):
                self.evict(record)
            raise
        self.records[record.id] = self.active = record
        self.used(record)

    def _rest(self, leaving: Record | None, instead_of: Record | None) -> None:
        """Take the active session off the device, onto the host or out of memory."""
        if leaving is None or leaving.session is None:
            return
        if leaving.broken:  # half written: nothing of it could be used again
            self.drop(leaving)
        elif self.make_room(leaving, instead_of):
            leaving.session.release()
            self.active = None
            leaving.measure()
        else:
            self.evict(leaving)

    def _loaded(self, record: Record) -> RunningSession:
        """The session of a record that is on disk."""
        assert self.store is not None
        assert record.checkpoint is not None
        session = self.engine.fresh()
        session.load(self.store.restore(record.checkpoint))
        return session
