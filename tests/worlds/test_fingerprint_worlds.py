"""What each runtime needs for a return, found by taking things away, with no hint of how it works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_runtimes import MAKE, MODEL, onward, walked

from statebridge.sessions.fingerprint import Fingerprint, max_difference
from statebridge.sessions.session import BufferSpec
from statebridge.worlds.runtimes import WorldSession


def _to(kind: str, chunks: int) -> Callable[[WorldSession], None]:
    def anchor(session: WorldSession) -> None:
        session.load(walked(kind, chunks).buffers())

    return anchor


def _group(spec: BufferSpec) -> str:
    return "layers" if spec.name.startswith("layers.") else spec.name


def _found(kind: str, lengths: tuple[int, ...]) -> Fingerprint:
    return Fingerprint.discover(
        lambda: MAKE[kind](MODEL),
        {n: _to(kind, n) for n in lengths},
        lambda session: onward(session).numpy(),
        max_difference,
        group=_group,
    )


@pytest.mark.parametrize("kind", ["markov", "bank"])
def test_frames_poses_clock_and_random_state(kind: str) -> None:
    prefix = {"markov": "last", "bank": "bank"}[kind]
    found = _found(kind, (2, 4))
    fields = ("frames", "actions", "poses", "times")
    assert {"random", "pose", "clock.time", *(f"{prefix}.{field}" for field in fields)} <= set(found.needed)
    assert "settings" not in found.needed


def test_keys_are_derivable_in_a_window_that_never_rolled() -> None:
    found = _found("windowed", (2, 3))
    assert "layers" not in found.needed
    assert {"window.frames", "random", "pose", "clock.time"} <= set(found.needed)


def test_keys_are_needed_where_the_window_rolled() -> None:
    found = _found("windowed", (2, 5))
    assert "layers" in found.needed
    assert "window.frames" not in found.needed
