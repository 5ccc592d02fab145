"""The toy session on a runtime: a device is a flag, and every hook can be made to fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toy import Toy

from statebridge.sessions import Buffer, SessionRuntime


class RunningToy(Toy):
    """A toy that knows whether it is on the device."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.on_device = False
        self.sound = True
        self.failing: str | None = None  # the hook that raises

    def _maybe_fail(self, hook: str) -> None:
        if self.failing == hook:
            raise RuntimeError(f"{hook} fails")

    def load(self, buffers: Iterable[Buffer]) -> None:
        super().load(buffers)
        self.on_device = False

    def prepare(self) -> None:
        self._maybe_fail("prepare")
        assert not self.on_device
        self.on_device = True

    def release(self) -> None:
        self._maybe_fail("release")
        assert self.on_device
        self.on_device = False

    def nbytes(self) -> int:
        return self.cache.nbytes + self.memory.nbytes + self.tokens.nbytes

    def after(self, times: int = 1) -> int:
        return self.nbytes() + times * (2 * 3 * 4 + 8)

    def step(self, times: int = 1) -> RunningToy:
        assert self.on_device
        self.sound = False
        super().step(times)
        self._maybe_fail("step")
        self.sound = True
        return self


class ToyEngine:
    """Makes toys, and remembers all that it has made."""

    def __init__(self) -> None:
        self.made: list[RunningToy] = []

    def fresh(self, *, seed: int = 0) -> RunningToy:
        toy = RunningToy(seed)
        self.made.append(toy)
        return toy


def content(runtime: SessionRuntime, id: str) -> Any:
    """Buffers of a session wherever it is, without moving it."""
    record = runtime._tiers.records[id]
    if record.session is not None:
        return record.session.buffers()
    assert runtime.store is not None
    assert record.checkpoint is not None
    return runtime.store.restore(record.checkpoint)


def size(steps: int) -> int:
    """Bytes of a toy after `steps`."""
    return 5 * 8 + steps * 32
