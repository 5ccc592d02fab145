"""The device above host and disk: which session is active, how the next one takes its place, and who is asked for.

A change of the active session reads the next one first, makes room for the last one, takes that off the device, and
puts the next one onto it. An error at any of these leaves every session where it can be found: on the device, on the
host, or in the store. Knows sessions by their protocol only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

from statebridge.errors import BudgetError, ConfigError, StoreError
from statebridge.sessions.policies import Policy
from statebridge.sessions.runtime_memory import Memory
from statebridge.sessions.runtime_protocol import Engine, RunningSession
from statebridge.sessions.runtime_records import Record
from statebridge.sessions.session import random_last
from statebridge.sessions.store import SessionStore


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
        if device_budget < 0:
            raise ConfigError(f"A device_budget of {device_budget} bytes holds nothing; give 0 or more.")
        self.engine, self.device_budget, self.clock = engine, device_budget, clock
        self._turn = 0

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
        """Move those out that the policy wants out although memory is not short; warn of who cannot leave."""
        now = self.clock()
        for record in self.records.values():
            record.used_at = min(record.used_at, now)  # the clock went back
        movable = {record.id: record for record in self.on_host() if not record.pinned}
        residents = [record.resident() for record in movable.values()]
        pinned = sum(record.nbytes for record in self.on_host() if record.pinned)
        for id in self.policy.due(residents, now, self.budget - pinned):
            if id not in movable:
                name = type(self.policy).__name__
                raise ConfigError(
                    f"{name} wants {id} out, which may not leave; `due` may name what it is given."
                )
            record = movable[id]
            if record.session is not None and not self.policy.keeps(record.resident()):
                try:
                    self.evict(record)
                except (BudgetError, StoreError) as error:  # nothing is short, so whoever called can go on
                    warnings.warn(f"Session {id} cannot leave memory, and stays: {error}", stacklevel=4)

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
            session = self.loaded(record)
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

    def loaded(self, record: Record) -> RunningSession:
        """A session as the latest checkpoint of a record has it, off the device."""
        assert self.store is not None
        assert record.checkpoint is not None
        session = self.engine.fresh()
        session.load(random_last(self.store.restore(record.checkpoint)))
        return session
