"""What a conformance test knows of a runtime: how to make one, where it stands, and how to go away from there.

Knows sessions and stores, no runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic

from statebridge.sessions.fingerprint.bench import Runtime, owned
from statebridge.sessions.session import Buffer, random_last
from statebridge.sessions.store import SessionStore


@dataclass(frozen=True, eq=False)
class Setting(Generic[Runtime]):
    """A runtime, an anchor, and a store to go through.

    Attributes
    ----------
    factory
        Gives a runtime that has read nothing.
    anchor, other, earlier
        Bring a fresh runtime to the state to return to, to another session's, and to this session's before it
        came to the anchor.
    wander
        Lets a runtime go on with something else.
    probe
        Lets a runtime go on and gives the outcome.
    store
        Where checkpoints go.
    """

    factory: Callable[[], Runtime]
    anchor: Callable[[Runtime], object]
    other: Callable[[Runtime], object]
    earlier: Callable[[Runtime], object]
    wander: Callable[[Runtime], object]
    probe: Callable[[Runtime], Any]
    store: SessionStore

    def at(self, anchor: Callable[[Runtime], object]) -> Runtime:
        """A fresh runtime, brought somewhere."""
        runtime = self.factory()
        anchor(runtime)
        return runtime

    def saved(self, anchor: Callable[[Runtime], object]) -> tuple[Buffer, ...]:
        """What a runtime holds there, in memory of its own."""
        return owned(self.at(anchor).buffers())

    def outcome(self, buffers: Iterable[Buffer], runtime: Runtime | None = None) -> Any:
        """What a runtime, a fresh one if none is given, does next after it has loaded these buffers."""
        runtime = self.factory() if runtime is None else runtime
        runtime.load(random_last(buffers))
        return self.probe(runtime)
