"""Random lives of a runtime against a plain dictionary that keeps everything. Equality is bit-exact, by digest."""

from __future__ import annotations

import functools
import shutil
import tempfile
from pathlib import Path

import pytest
from crash import Failing
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toy import Toy, digest
from toy_runtime import ToyEngine, content, size

from statebridge.errors import BudgetError, StatebridgeError
from statebridge.sessions import SessionRuntime, SessionStore
from statebridge.sessions.policies import LRU, GreedyDualSize, Policy, PredictiveShrinking, Relevance

pytestmark = pytest.mark.filterwarnings("ignore:Session . cannot leave memory")  # the disk fails on purpose
MEMORY = Path("/dev/shm")
DEVICE, HOST = size(20), 2 * size(6)
NAMES = st.sampled_from("abcdef")
POLICIES: tuple[type[Policy], ...] = (LRU, GreedyDualSize, Relevance, PredictiveShrinking)


class RuntimeMachine(RuleBasedStateMachine):
    """`twins` says what each session must be, `durable` what a new process must find."""

    @initialize(policy=st.sampled_from(POLICIES))
    def begin(self, policy: type[Policy]) -> None:
        self.root = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        SessionStore(self.root / "store", segment=3)
        self.policy = policy
        self.left = [0]
        self.twins: dict[str, Toy] = {}
        self.durable: dict[str, Toy] = {}
        self.pinned: set[str] = set()
        self.start()

    def start(self) -> None:
        files = functools.partial(Failing, left=self.left)
        store = SessionStore(self.root / "store", files=files)
        self.run = SessionRuntime(ToyEngine(), store, DEVICE, HOST, self.policy())

    def teardown(self) -> None:
        if hasattr(self, "root"):
            shutil.rmtree(self.root)

    def tried(self, act) -> bool:
        """Whether a call went through; if not, it must have had a reason, and have changed nothing that counts."""
        try:
            act()
            return True
        except StatebridgeError as error:
            refused = error
        if isinstance(refused, BudgetError):
            assert self.pinned or "on the device" in str(refused)
        else:
            assert self.left[0] <= 0
            assert "cannot" in str(refused)
        return False

    def unused(self, name: str) -> bool:
        """Whether neither the runtime has the name nor the store, where a fork that failed may have left it."""
        return name not in self.twins and not self.run._tiers.stored(name)

    @rule(name=NAMES, seed=st.integers(0, 3))
    def new(self, name: str, seed: int) -> None:
        if self.unused(name) and self.tried(lambda: self.run.new(name, seed=seed)):
            self.twins[name] = Toy(seed)
            self.step(5)

    @rule(times=st.integers(0, 9))
    def step(self, times: int) -> None:
        active = self.run.usage().active
        if active is not None and self.tried(lambda: self.run.step(times)):
            self.twins[active].step(times)

    @rule(name=NAMES)
    def switch(self, name: str) -> None:
        if name in self.twins and self.tried(lambda: self.run.switch(name)):
            assert self.run.usage().active == name

    @rule()
    def rest(self) -> None:
        self.tried(lambda: self.run.switch(None))

    @rule(parent=NAMES, child=NAMES, switch=st.booleans())
    def fork(self, parent: str, child: str, switch: bool) -> None:
        possible = parent in self.twins and self.unused(child)
        if possible and self.tried(lambda: self.run.fork(parent, child, switch=switch)):
            self.twins[child] = self.twins[parent].copy()

    @rule(name=NAMES)
    def evict(self, name: str) -> None:
        if name in self.twins and name not in self.pinned:
            self.tried(lambda: self.run.evict(name))

    @rule(name=NAMES, relevance=st.integers(0, 2))
    def mark(self, name: str, relevance: int) -> None:
        if name in self.twins:
            self.run.mark(name, relevance)

    @rule(name=NAMES, pinned=st.booleans())
    def pin(self, name: str, pinned: bool) -> None:
        if name in self.twins and self.run._tiers.records[name].session is not None:
            self.run.pin(name, pinned)
            (self.pinned.add if pinned else self.pinned.discard)(name)

    @rule(name=NAMES)
    def checkpoint(self, name: str) -> None:
        if name in self.twins:
            self.tried(lambda: self.run.checkpoint(name))

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        self.left[0] = 0  # a deletion that fails half-way leaves checkpoints that may be opened again
        if name in self.twins:
            self.run.delete(name)
            for kept in (self.twins, self.durable):
                kept.pop(name, None)
            self.pinned.discard(name)

    @rule(name=NAMES)
    def close_and_open(self, name: str) -> None:
        if name in self.twins and self.tried(lambda: self.run.close(name)):
            self.pinned.discard(name)
            self.durable[name] = self.twins.pop(name).copy()
            if self.tried(lambda: self.run.open(name)):
                self.twins[name] = self.durable[name].copy()

    @rule(name=NAMES)
    def open(self, name: str) -> None:
        possible = name in self.durable and name not in self.twins
        if possible and self.tried(lambda: self.run.open(name)):
            self.twins[name] = self.durable[name].copy()

    @rule()
    @precondition(lambda self: self.run.usage().active in getattr(self, "durable", {}))
    def fail_half_way(self) -> None:
        self.left[0] = 0
        name = self.run.usage().active
        self.run.active.failing = "step"
        try:
            self.run.step(1)
        except StatebridgeError:
            self.run.active.failing = None  # it was too long for the device, and did not begin
            return
        except RuntimeError:
            self.run.revert(name)
        self.twins[name] = self.durable[name].copy()

    @rule(n=st.integers(1, 12))
    def disk_will_fail(self, n: int) -> None:
        self.left[0] = n

    @rule()
    def another_process(self) -> None:
        """Memory is gone; what was on disk is found by its name."""
        self.left[0] = 0
        self.start()
        self.twins.clear()
        self.pinned.clear()
        for name, toy in self.durable.items():
            self.run.open(name)
            self.twins[name] = toy.copy()

    @invariant()
    def everything_is_as_it_should_be(self) -> None:
        if not hasattr(self, "run"):
            return
        left, self.left[0] = self.left[0], 0
        usage = self.run.usage()
        records = self.run._tiers.records
        assert set(records) == set(self.twins)
        assert usage.lost == ()
        assert usage.device <= DEVICE
        assert usage.host <= HOST
        on_device = {name for name, r in records.items() if r.session is not None and r.session.on_device}
        assert on_device == ({usage.active} if usage.active else set())
        assert not self.pinned & set(usage.on_disk)
        for name, toy in self.twins.items():
            assert digest(content(self.run, name)) == digest(toy.buffers())
            record = records[name]
            if record.checkpoint is not None and not record.changed:
                self.durable[name] = toy.copy()
        self.left[0] = left


TestRuntimeMachine = RuntimeMachine.TestCase
TestRuntimeMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
