"""Random lives of a store against a plain dictionary: parent, child and neighbour never disturb each other."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from toy import Toy, digest

from statebridge.errors import StoreError
from statebridge.sessions import SessionStore

MEMORY = Path("/dev/shm")


class StoreMachine(RuleBasedStateMachine):
    """Sessions run, are stored, evicted and restored; `model` says what each checkpoint must hold."""

    sessions = Bundle("sessions")
    checkpoints = Bundle("checkpoints")

    @initialize()
    def open(self) -> None:
        self.root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.store = SessionStore(self.root / "store", segment=3)
        self.model: dict[str, tuple[str, str | None]] = {}  # id -> (digest of its buffers, parent)
        self.twins: dict[int, Toy] = {}  # what each live session must be, kept without the store
        self.evicted: set[str] = set()

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)

    def live(self, toy: Toy) -> Toy:
        self.twins[id(toy)] = toy.copy()
        return toy

    @rule(target=sessions, seed=st.integers(0, 3))
    def begin(self, seed: int) -> Toy:
        return self.live(Toy(seed))

    @rule(session=sessions, times=st.integers(1, 7))
    def step(self, session: Toy, times: int) -> None:
        session.step(times)
        self.twins[id(session)].step(times)

    @rule(target=checkpoints, session=sessions, parent=st.none() | checkpoints)
    def checkpoint(self, session: Toy, parent: str | None) -> str:
        if parent not in self.model:
            parent = None
        made = self.store.checkpoint(session, parent=parent)
        self.model[made] = (digest(self.twins[id(session)].buffers()), parent)
        return made

    @rule(target=sessions, identifier=checkpoints)
    def restore(self, identifier: str) -> Toy:
        toy = Toy(77)
        if identifier in self.model:
            toy.load(self.store.restore(identifier))
            assert digest(toy.buffers()) == self.model[identifier][0]
        else:
            with pytest.raises(StoreError):
                self.store.restore(identifier)
        return self.live(toy)

    @rule(target=checkpoints, identifier=checkpoints)
    def fork(self, identifier: str) -> str:
        if identifier not in self.model:
            return identifier
        made = self.store.fork(identifier)
        self.model[made] = (self.model[identifier][0], identifier)
        return made

    @rule(identifier=consumes(checkpoints))
    def delete(self, identifier: str) -> None:
        if identifier in self.model:
            self.store.delete(identifier)
            del self.model[identifier]

    @rule(session=consumes(sessions), other=sessions)
    def evict(self, session: Toy, other: Toy) -> None:
        """Into the store, out of memory, and back in the place of another session."""
        made = self.store.checkpoint(session)
        expected = digest(self.twins[id(session)].buffers())
        other.load(self.store.restore(made))
        self.twins[id(other)] = other.copy()
        assert digest(other.buffers()) == expected
        self.store.delete(made)

    @rule()
    def collect(self) -> None:
        self.store.gc()
        assert self.store.gc(dry_run=True).nbytes == 0

    @rule(lose_index=st.booleans())
    def reopen(self, lose_index: bool) -> None:
        if lose_index:
            (self.root / "store" / "index.sqlite").unlink(missing_ok=True)
        self.store = SessionStore(self.root / "store")

    @rule(identifier=checkpoints)
    def move(self, identifier: str) -> None:
        """Out as an archive, deleted, collected, and in again."""
        if identifier not in self.model:
            return
        archive = self.root / "moved.tar"
        self.store.export_archive(identifier, archive)
        self.store.delete(identifier)
        self.store.gc()
        assert self.store.import_archive(archive) == identifier
        archive.unlink()

    @invariant()
    def everything_is_as_it_was(self) -> None:
        if not hasattr(self, "store"):
            return
        listed = {c.id: c.parent for c in self.store.list()}
        assert listed == {identifier: parent for identifier, (_, parent) in self.model.items()}
        for identifier, (content, _) in self.model.items():
            assert digest(self.store.restore(identifier)) == content


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
