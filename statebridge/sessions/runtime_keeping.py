"""What a runtime does with sessions wherever they are: store, forget, pin, mark, move out, look.

Apart from `runtime`, where sessions take turns on the device.
"""

from __future__ import annotations

from statebridge.errors import BudgetError, StoreError
from statebridge.sessions.index import Checkpoint
from statebridge.sessions.policies import checked_relevance
from statebridge.sessions.runtime_protocol import RunningSession
from statebridge.sessions.runtime_records import Record, Usage
from statebridge.sessions.runtime_tiers import Tiers
from statebridge.sessions.store import SessionStore


class Keeping:
    """Sessions of a runtime, wherever they are.

    Parameters
    ----------
    tiers
        Device, host and disk.
    """

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers

    @property
    def store(self) -> SessionStore | None:
        """Where sessions go that leave memory; None without."""
        return self._tiers.store

    @property
    def active(self) -> RunningSession | None:
        """The session on the device, to look at; None without."""
        return None if self._tiers.active is None else self._tiers.active.session

    def usage(self) -> Usage:
        """Bytes that are held now, and who is where."""
        return self._tiers.usage()

    def lineage(self, id: str | None = None) -> tuple[Checkpoint, ...]:
        """The session's latest checkpoint, that one's parent, and so on."""
        record = self._tiers.find(id, sound=False)
        if self.store is None or record.checkpoint is None:
            return ()
        return self.store.lineage(record.checkpoint)

    def checkpoint(self, id: str | None = None) -> str:
        """Store a session, by default the active one; what is given back is durable and stays in the store."""
        record = self._tiers.find(id)
        self._tiers.save(record, kept=True)
        assert record.checkpoint is not None  # else saving has failed
        return record.checkpoint

    def revert(self, id: str) -> None:
        """Go back to the latest checkpoint of a session, for example after a step that failed half-way.

        Raises
        ------
        StoreError
            When there is none, or the store cannot give it; the session stays as it is.
        """
        record = self._tiers.find(id, sound=False)
        if record.checkpoint is None:
            raise StoreError(f"Session {id} was never stored, so there is nothing to go back to; delete it.")
        was_active = record is self._tiers.active
        before = self._tiers.loaded(record)  # the store may not have it any more; then nothing is dropped
        self._tiers.drop(record)
        record.broken = record.changed = False
        if was_active:
            record.session = before
            record.measure()
            self._tiers.activate(record)

    def close(self, id: str | None = None) -> str:
        """Store a session, forget it here, and return its checkpoint; `open` brings it back."""
        checkpoint = self.checkpoint(id)
        self._forget(self._tiers.find(id))
        return checkpoint

    def delete(self, id: str) -> None:
        """Forget a session, and delete every checkpoint that carries its name; its forks stay whole.

        Raises
        ------
        StoreError
            When a checkpoint cannot be deleted; the session is still here, to be deleted again.
        """
        record = self._tiers.find(id, sound=False)
        for checkpoint in self._tiers.stored(id):
            assert self.store is not None
            try:
                self.store.delete(checkpoint.id)
            except StoreError:
                if self._tiers.known(checkpoint.id):  # else somebody else was faster
                    raise
        self._forget(record)

    def evict(self, id: str) -> None:
        """Move a session out of memory now."""
        record = self._tiers.find(id, sound=False)
        if not self._tiers.may_leave(record, record.resident()):
            raise BudgetError(
                f"Session {id} is pinned; unpin it, or change the rule, before it may leave memory."
            )
        if record.session is not None:
            self._tiers.evict(record)

    def pin(self, id: str, pinned: bool = True) -> None:
        """Keep a session in memory, or let it go again."""
        self._tiers.find(id).pinned = pinned

    def mark(self, id: str, relevance: float) -> None:
        """Say how much a session matters to what comes; policies keyed by relevance keep the highest."""
        self._tiers.find(id).relevance = checked_relevance(id, relevance)

    def _forget(self, record: Record) -> None:
        self._tiers.drop(record)
        del self._tiers.records[record.id]
