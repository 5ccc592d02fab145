"""What a runtime needs of the sessions it moves: the store's two methods, and four about memory and work.

A language model's chat is one such session (`statebridge.sessions.runtime_language`); a world model or a toy is
another. The runtime never looks inside: it asks for bytes, and says when to go onto the device and off it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from statebridge.sessions.session import Buffer


class RunningSession(Protocol):
    """A session that can be off the device, where it rests, or on it, where it steps.

    Attributes
    ----------
    sound
        False from the moment when a step begins to write until it has written everything: a session that failed in
        between must not be saved.
    """

    sound: bool

    def buffers(self) -> Iterable[Buffer]:
        """Every buffer that a continuation needs, wherever the session is; it shares memory or copies it."""

    def load(self, buffers: Iterable[Buffer]) -> None:
        """Become the session that gave these buffers, off the device, in memory of its own."""

    def prepare(self) -> None:
        """Go onto the device and leave nothing behind; when an error is raised, all is as before."""

    def release(self) -> None:
        """Go off the device and leave nothing there; when an error is raised, all is as before."""

    def nbytes(self) -> int:
        """Bytes of all memory that it holds now, on the device or off it."""

    def after(self, *given: Any, **options: Any) -> int:
        """Bytes that it will hold after `step` with these arguments; changes nothing.

        Raises
        ------
        StatebridgeError
            When it cannot take that step.
        """

    def step(self, *given: Any, **options: Any) -> Any:
        """Read or make what is next, on the device."""


class Engine(Protocol):
    """Makes sessions of one kind."""

    def fresh(self, *args: Any, **begin: Any) -> RunningSession:
        """A new session off the device; without arguments, one that is about to be loaded."""
