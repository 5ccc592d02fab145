"""Which sessions a runtime has, by name, and where each of them is.

A record goes through memory, disk and back; its name stays. In the store a checkpoint carries the name in its
label, `name` or `name | event`, by which another runtime finds it. Knows sessions by their protocol, and moves none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from statebridge.errors import StatebridgeError, StoreError
from statebridge.sessions.index import Checkpoint
from statebridge.sessions.policies import Resident
from statebridge.sessions.runtime_protocol import RunningSession
from statebridge.sessions.store import SessionStore

_MARK = " | "
#: Event of a checkpoint that nobody asked for: the next eviction of the session replaces it.
EVICTED = "evicted"


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


@dataclass(frozen=True)
class Usage:
    """Where sessions are, and the bytes that they hold on the device and on the host."""

    device: int
    host: int
    active: str | None
    on_host: tuple[str, ...]
    on_disk: tuple[str, ...]
    lost: tuple[str, ...]


def label_of(name: str, event: str = "") -> str:
    """The label of a session's checkpoint."""
    return f"{name}{_MARK}{event}" if event else name


def name_in(label: str) -> str:
    """The session's name in a label."""
    return label.partition(_MARK)[0]


class Records:
    """Sessions of one runtime by name.

    Parameters
    ----------
    store
        Where sessions go that leave memory; None when there is no disk.
    """

    def __init__(self, store: SessionStore | None) -> None:
        self.store = store
        self.records: dict[str, Record] = {}
        self.active: Record | None = None  # on the device, the only one

    def on_host(self) -> list[Record]:
        """Sessions in memory and off the device."""
        return [r for r in self.records.values() if r.session is not None and r is not self.active]

    def new_record(self, name: str, *, unstored: bool = False) -> Record:
        """A record of an unused name, not yet among the others; `unstored` when the store may not have it either.

        Raises
        ------
        StoreError
            When the name is empty, too long, not printable, holds the mark that labels use, or is taken.
        """
        # a label must give the name back, so a name may not end like the mark either
        if not (0 < len(name) <= 100 and name.isprintable() and name_in(f"{name}{_MARK}") == name):
            raise StoreError(
                f"{name[:40]!r} is no session name; use up to 100 printable characters without ' | '."
            )
        if name in self.records:
            raise StoreError(f"A session named {name} is open already; switch to it, or choose another name.")
        if unstored and self.stored(name):
            raise StoreError(
                f"The store has a session named {name} already; open it, or choose another name for a new one."
            )
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
        return [c for c in self.store.list() if name_in(c.label) == name]

    def newest(self, name: str) -> str:
        """The checkpoint with which a stored session goes on: the last of its line, of several lines the youngest.

        Raises
        ------
        StoreError
            When the store has none.
        """
        named = self.stored(name)
        if not named:
            raise StoreError(
                f"The store has no session named {name}; `statebridge sessions ls` shows what it has."
            )
        parents = {checkpoint.parent for checkpoint in named}  # clocks jump, lineage does not
        return max((c for c in named if c.id not in parents), key=lambda c: c.created).id

    def lasting(self, checkpoint: str, name: str) -> str:
        """The checkpoint, or a copy of it when the runtime that made it may replace it (see `EVICTED`)."""
        assert self.store is not None
        if self.store.manifest(checkpoint).label.endswith(f"{_MARK}{EVICTED}"):
            return self.store.fork(checkpoint, label=name)
        return checkpoint

    def known(self, identifier: str | None) -> str | None:
        """The checkpoint, unless there is none or somebody has deleted it since."""
        if identifier is None or self.store is None:
            return None
        try:
            self.store.manifest(identifier)
        except StoreError:
            return None
        return identifier

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
