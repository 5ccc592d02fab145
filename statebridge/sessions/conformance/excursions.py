"""Ways to leave an anchor and come back. Each gives what the session does next after its return.

One small class each; anything with a name that maps a setting to an outcome is an excursion too.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from statebridge.errors import FingerprintError
from statebridge.sessions.conformance.setting import Setting
from statebridge.sessions.fingerprint.bench import Runtime, owned
from statebridge.sessions.session import BufferKind, random_last
from statebridge.sessions.store import SessionStore


class Excursion(Protocol):
    """A way to leave and come back."""

    @property
    def name(self) -> str:
        """As the verdict lists it."""

    def __call__(self, setting: Setting[Runtime]) -> Any:
        """The outcome after the return."""


@dataclass(frozen=True)
class OtherText:
    """The same runtime goes on with something else, then loads its checkpoint: nothing of it may be left."""

    name: str = "other text"

    def __call__(self, setting: Setting[Runtime]) -> Any:
        """The outcome after the return."""
        runtime = setting.at(setting.anchor)
        here = setting.store.checkpoint(runtime)
        setting.wander(runtime)
        return setting.outcome(setting.store.restore(here), runtime)


@dataclass(frozen=True)
class OtherSessions:
    """One runtime serves this session and another in turns; each is loaded and saved again every time.

    Attributes
    ----------
    rounds
        Turns of the other session.
    """

    rounds: int = 3
    name: str = "other sessions in turns"

    def __call__(self, setting: Setting[Runtime]) -> Any:
        """The outcome after the return."""
        store = setting.store
        there = store.checkpoint(setting.at(setting.other))
        runtime = setting.at(setting.anchor)
        for _ in range(self.rounds):
            here = store.checkpoint(runtime)
            runtime.load(random_last(store.restore(there)))
            setting.wander(runtime)
            there = store.checkpoint(runtime, parent=there)
            runtime.load(random_last(store.restore(here)))
        return setting.probe(runtime)


@dataclass(frozen=True)
class Eviction:
    """The runtime is dropped, other checkpoints are deleted and collected, and the store is opened anew."""

    name: str = "eviction"

    def __call__(self, setting: Setting[Runtime]) -> Any:
        """The outcome after the return."""
        first = setting.store.checkpoint(setting.at(setting.anchor))
        here = setting.store.fork(first)
        setting.store.delete(setting.store.checkpoint(setting.at(setting.other)))
        setting.store.delete(first)
        setting.store.gc()
        return setting.outcome(SessionStore(setting.store.path, create=False).restore(here))


@dataclass(frozen=True)
class Fork:
    """A fork in memory, from the live buffers, goes elsewhere; the session that stayed must not have moved."""

    name: str = "fork goes elsewhere"

    def __call__(self, setting: Setting[Runtime]) -> Any:
        """The outcome after the return."""
        parent, child = setting.at(setting.anchor), setting.factory()
        before = owned(parent.buffers())
        child.load(random_last(parent.buffers()))
        setting.wander(child)
        after = {buffer.name: buffer for buffer in owned(parent.buffers())}
        # generators of the process serve both, so those are taken from before
        stayed = [b if b.spec.kind is BufferKind.RANDOM else after[b.name] for b in before]
        return setting.outcome(stayed)


@dataclass(frozen=True)
class DisturbedProcess:
    """The process's random generators are elsewhere when the session comes back."""

    name: str = "disturbed process"

    def __call__(self, setting: Setting[Runtime]) -> Any:
        """The outcome after the return."""
        here = setting.store.checkpoint(setting.at(setting.anchor))
        runtime = setting.factory()
        with _disturbed():
            return setting.outcome(setting.store.restore(here), runtime)


@dataclass(frozen=True)
class AnotherProcess:
    """The session comes back in a new process with other seeds.

    The factory and the probe are sent there by name, so they must be functions of a module (or partials of such).

    Attributes
    ----------
    timeout
        Seconds to wait, start of the process included; then the return has failed.
    """

    timeout: float = 300.0
    name: str = "another process"

    def __call__(self, setting: Setting[Runtime]) -> Any:
        """The outcome after the return."""
        try:
            pickle.dumps((setting.factory, setting.probe))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise FingerprintError(
                f"The factory and the probe cannot be sent to another process ({error}); give functions of a "
                "module, or leave AnotherProcess out of the excursions."
            ) from error
        here = setting.store.checkpoint(setting.at(setting.anchor))
        path = os.fspath(setting.store.path)
        # spawned, not forked: a fork would inherit whatever the runtime leaves in this process
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # leaving it ends a process that is stuck
            sent = (setting.factory, setting.probe, path, here)
            return pool.apply_async(_there, sent).get(self.timeout)


def _there(factory: Callable[[], Runtime], probe: Callable[[Runtime], Any], path: str, here: str) -> Any:
    runtime = factory()
    _seed(97)
    runtime.load(random_last(SessionStore(path, create=False).restore(here)))
    return probe(runtime)


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def _disturbed() -> Iterator[None]:
    """Other random states of python, numpy and torch, put back afterwards."""
    before = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count())  # seeding torch seeds them too
    try:
        with torch.random.fork_rng(devices=devices):
            _seed(97)
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


EXCURSIONS: tuple[Excursion, ...] = (
    OtherText(),
    OtherSessions(),
    Eviction(),
    Fork(),
    DisturbedProcess(),
    AnotherProcess(),
)
