"""A runtime of numpy arrays with every kind of buffer planted in it, so that the right answer is known beforehand.

    x_t   = tanh(draw_t + totals / 9 + key · sin(clock) + gain · Σ recent)
    out_t = softmax(notes · draw_t) notes,   with x_t added to notes and totals, draw_t to recent

| buffer | planted as |
|---|---|
| notes | grows; needed |
| recent | window of three; needed |
| clock, random | needed |
| left, right | one key kept twice: either alone can be spared, not both |
| totals | derivable from notes |
| scratch | overwritten before it is read: its shape is enough |
| settings | a new runtime has the same |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import numpy as np

from statebridge.sessions import Buffer, BufferKind
from statebridge.sessions.fingerprint import Derivation

NEEDED = {"notes", "recent", "clock", "random", "right"}


class Planted:
    """See the module; `step` goes on, `buffers` and `load` leave and return."""

    def __init__(self) -> None:
        self.notes = np.zeros((0, 4))
        self.totals = np.zeros(4)
        self.recent = np.zeros((0, 4))
        self.left = self.right = np.zeros(0)
        self.scratch = np.zeros(0)
        self.clock = 0
        self.settings = {"gain": 0.5}
        self.random = np.random.Generator(np.random.PCG64(99))

    def begin(self, seed: int) -> None:
        """Draw what this session keeps, and its random state."""
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.left = self.random.standard_normal(4)
        self.right = self.left.copy()
        self.scratch = np.zeros(8)

    def step(self, times: int = 1) -> np.ndarray:
        """Outputs [times, 4]."""
        out = []
        for _ in range(times):
            self.scratch[:] = np.tile(self.random.standard_normal(4), 2)
            draw = self.scratch[4:]
            key = self.left if self.left.any() else self.right
            note = (
                draw + self.totals / 9 + key * np.sin(self.clock) + self.settings["gain"] * self.recent.sum(0)
            )
            note = np.tanh(note)
            self.notes = np.concatenate((self.notes, note[None]))
            self.totals += note  # in place, so that what was saved must have memory of its own
            self.recent = np.concatenate((self.recent, draw[None]))[-3:]
            self.clock += 3
            weights = np.exp(self.notes @ draw)
            out.append(weights @ self.notes / weights.sum())
        return np.stack(out)

    def buffers(self) -> Iterable[Buffer]:
        """Every buffer; the pair only once it has been drawn."""
        yield Buffer.json("random", BufferKind.RANDOM, self.random.bit_generator.state)
        yield Buffer.of("notes", BufferKind.KV, self.notes, grows=0)
        yield Buffer.of("totals", BufferKind.RECURRENT, self.totals, derivable_from=("notes",))
        yield Buffer.of("recent", BufferKind.WINDOW, self.recent)
        if self.left.size:
            yield Buffer.of("left", BufferKind.LATENT, self.left)
            yield Buffer.of("right", BufferKind.LATENT, self.right)
        yield Buffer.of("scratch", BufferKind.LATENT, self.scratch)
        yield Buffer.of("clock", BufferKind.CLOCK, self.clock)
        yield Buffer.of(
            "settings", BufferKind.SETTINGS, np.frombuffer(json.dumps(self.settings).encode(), np.uint8)
        )

    def load(self, buffers: Iterable[Buffer]) -> None:
        """Return; one of the pair stands in for the other."""
        named = {buffer.name: buffer for buffer in buffers}
        self.notes, self.totals, self.recent, self.scratch = (
            named[name].array().copy() for name in ("notes", "totals", "recent", "scratch")
        )
        self.left, self.right = (
            named[name].array().copy() if name in named else np.zeros(4) for name in ("left", "right")
        )
        self.clock = int(named["clock"].array())
        self.settings = named["settings"].value()
        self.random.bit_generator.state = named["random"].value()

    def derivations(self) -> Iterable[Derivation]:
        """Totals are the sum of the notes."""
        yield Derivation(("totals",), ("notes",), totals_of)


def totals_of(sources: Mapping[str, Buffer]) -> Iterable[Buffer]:
    """Totals from notes, added up in the order of the steps, so that rounding is the same."""
    totals = np.zeros(4)
    for note in sources["notes"].array():
        totals = totals + note
    yield Buffer.of("totals", BufferKind.RECURRENT, totals)


def anchor(runtime: Planted, seed: int = 1, steps: int = 6) -> None:
    """A session of some steps."""
    runtime.begin(seed)
    runtime.step(steps)


def other(runtime: Planted) -> None:
    """Another session, of the same length."""
    anchor(runtime, seed=2)


def earlier(runtime: Planted) -> None:
    """The session two steps before the anchor."""
    anchor(runtime, steps=4)


def wander(runtime: Planted) -> None:
    """Go on elsewhere."""
    runtime.step(5)


def probe(runtime: Planted) -> np.ndarray:
    """What comes next."""
    return runtime.step(3)
