"""Many sessions on one device: one of them steps, the others rest on the host, and then on disk.

    runtime = SessionRuntime(model, store, device_budget=..., host_budget=..., policy=LRU())
    runtime.new("chat"); runtime.step(ids); runtime.switch("other"); runtime.fork("chat", "what if")

Only the active session holds device memory, so that it stays flat in the number of sessions. What rests on the host
is bounded by `host_budget`; a policy says who leaves for the disk. Nothing is lost silently: a session that left
memory is durable in the store, or the call that wanted it out has failed and says why. Budgets bound what sessions
hold when a call returns; while one of them moves, its own bytes are on their way as well. For one thread.

Source: the session-centric runtime of persistent computational state (docs/sessions.md).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from statebridge.errors import StoreError
from statebridge.sessions.policies import LRU, Policy, checked_relevance
from statebridge.sessions.runtime_keeping import Keeping
from statebridge.sessions.runtime_protocol import Engine, RunningSession
from statebridge.sessions.runtime_records import Record
from statebridge.sessions.runtime_tiers import Tiers
from statebridge.sessions.session import random_last
from statebridge.sessions.store import SessionStore

if TYPE_CHECKING:
    from statebridge.bridge import Bridge


class SessionRuntime(Keeping):
    """Sessions that take turns on one device.

    Parameters
    ----------
    model
        A transformers model, or an engine that makes sessions (`LanguageEngine`, or one of your own).
    store
        Where sessions go that leave memory, and where checkpoints are kept; None for a runtime without a disk.
    device_budget
        Bytes that the active session may hold.
    host_budget
        Bytes that all the others may hold in memory.
    policy
        Who leaves memory first; `LRU` when left out.
    may_lose
        Without a store, give up sessions when memory is short (`Usage.lost` names them) instead of failing.
    clock
        Seconds, for policies that count them.
    """

    def __init__(
        self,
        model: Any,
        store: SessionStore | None,
        device_budget: int,
        host_budget: int,
        policy: Policy | None = None,
        *,
        may_lose: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        engine: Engine = model if hasattr(model, "fresh") else _language_engine(model)
        super().__init__(Tiers(engine, store, device_budget, host_budget, policy or LRU(), may_lose, clock))

    # beginning

    def new(self, id: str, **begin: Any) -> None:
        """Begin a session and make it the active one; `begin` goes to the engine.

        Raises
        ------
        BudgetError
            When it does not fit, or the policy refuses it.
        StoreError
            When the name cannot be used, or a session that must leave cannot be stored.
        """
        record = self._tiers.new_record(id, unstored=True)
        self._tiers.expire()
        record.session = self._tiers.engine.fresh(**begin)
        self._tiers.admit(record.session)
        self._tiers.activate(record)

    def open(self, id: str, checkpoint: str | None = None) -> None:
        """Go on with a stored session, and make it the active one.

        Parameters
        ----------
        id
            Its name.
        checkpoint
            Id of the checkpoint; the newest of this name when left out.
        """
        record = self._tiers.new_record(id)
        if self.store is None:
            raise StoreError(f"Session {id} cannot be opened: the runtime has no store.")
        if checkpoint is None:
            checkpoint = self._tiers.newest(id)
        self._tiers.expire()
        record.checkpoint = record.kept = self._tiers.lasting(checkpoint, id)
        record.changed = False
        self._tiers.activate(record)

    # the active session

    def step(self, given: Any = None, **options: Any) -> Any:
        """Let the active session read or make what is next; see the session's `step`.

        Raises
        ------
        BudgetError
            When it would not fit on the device any more; nothing has changed then.
        """
        return self._advance("step", given, options)

    def generate(self, given: Any = None, **options: Any) -> Any:
        """Let the active session generate; see `LanguageSession.generate`."""
        return self._advance("generate", given, options)

    def handoff(self, to: Any, *, bridge: Bridge) -> None:
        """Move the active session onto another model, where it goes on without reading anything again.

        Its lineage shows both sides: a checkpoint before, and one after.

        Parameters
        ----------
        to
            The receiver.
        bridge
            From the model that the session is on to the receiver; the way back needs a bridge back.

        Raises
        ------
        StateMismatch
            When the bridge leads elsewhere; the session stays where it is.
        """
        record = self._tiers.find(None)
        left = record.session
        assert left is not None
        moved: RunningSession = self._tiers.able(record, "handed_to")(to, bridge)
        self._tiers.require_device(record, moved.nbytes())
        if self.store is not None:
            self._tiers.save(record, kept=True)
        left.release()
        try:
            moved.prepare()
            record.session, record.changed = moved, True
            if self.store is not None:
                name = getattr(getattr(to, "config", None), "_name_or_path", "") or type(to).__name__
                self._tiers.save(record, kept=True, event=f"handed over to {name[-60:]}")
        except BaseException:
            moved.release()
            record.session = left
            left.prepare()
            raise
        self._tiers.used(record)

    # moving

    def switch(self, id: str | None) -> None:
        """Make another session the active one; None to have none on the device."""
        self._tiers.expire()
        self._tiers.activate(None if id is None else self._tiers.find(id))

    def fork(self, id: str | None, child: str, *, relevance: float = 0.0, switch: bool = False) -> None:
        """Begin a session that is equal to another one, and goes its own way.

        Parameters
        ----------
        id
            The parent; None for the active session.
        child
            Name of the new session.
        relevance
            Its mark from the beginning, so that no better session has to make room for it.
        switch
            Make it the active one at once; else it rests until it is switched to, and needs room to rest.

        Raises
        ------
        BudgetError, StoreError
            When it does not fit, or its name is taken; there is no child then.
        """
        tiers = self._tiers
        tiers.expire()
        parent, record = tiers.find(id), tiers.new_record(child, unstored=True)
        record.relevance = checked_relevance(child, relevance)
        kept = parent.kept
        parent.kept = record.kept = parent.checkpoint  # the child's line goes through it
        try:
            self._begin(record, parent)
            if switch:
                tiers.activate(record)
                return
            tiers.used(record)
            if record.session is not None and not tiers.make_room(record):
                tiers.evict(record)
        except BaseException:
            parent.kept = kept
            if self.store is not None and record.checkpoint is not None:
                with contextlib.suppress(StoreError):  # it only takes up space, and the name
                    self.store.delete(record.checkpoint)
            raise
        tiers.records[child] = record

    # inside

    def _begin(self, record: Record, parent: Record) -> None:
        """Give a new record what its parent holds, in memory or in the store, wherever the parent is."""
        if parent.session is None:
            assert self.store is not None
            assert parent.checkpoint is not None
            record.checkpoint = self.store.fork(parent.checkpoint, label=record.id)
            record.changed = False
        else:
            session = self._tiers.engine.fresh()
            session.load(random_last(parent.session.buffers()))
            self._tiers.admit(session)
            record.session = session
        self._tiers.used(parent)

    def _advance(self, verb: str, given: Any, options: dict[str, Any]) -> Any:
        record = self._tiers.find(None)
        session = record.session
        assert session is not None
        self._tiers.expire()
        act = self._tiers.able(record, verb)
        before = session.nbytes()
        self._tiers.require_device(record, session.after(given, **options))
        record.changed = True
        try:
            return act(given, **options)
        finally:
            record.broken = not session.sound
            record.growth = (record.growth + session.nbytes() - before) / 2
            self._tiers.used(record)


def _language_engine(model: Any) -> Engine:
    # transformers takes seconds to import, and other engines do not need it
    from statebridge.sessions.runtime_language import LanguageEngine

    return LanguageEngine(model)
