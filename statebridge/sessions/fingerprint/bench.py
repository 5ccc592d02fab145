"""Trials on a runtime: restore a session with some buffers replaced, and measure how far the return is off.

    D(assignment) = distance(probe(session that never left), probe(fresh runtime + load(assignment(buffers))))

Every trial has a fresh runtime of its own. What a trial raises counts as an infinite distance. Random states are
loaded last, so that nothing done while loading draws from them. Knows buffers, no tensors and no models.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar

import numpy as np

from statebridge.errors import StatebridgeError
from statebridge.sessions.fingerprint.derivation import Derivation, Deriving, derived
from statebridge.sessions.session import Buffer, BufferSpec, Session, random_last

Runtime = TypeVar("Runtime", bound=Session)


class Mode(StrEnum):
    """What stands in for a buffer."""

    FRESH = "fresh"  # what a new runtime has, which may be nothing
    ZERO = "zero"  # zeros of the same shape and dtype
    FOREIGN = "foreign"  # another session's buffer
    DERIVED = "derived"  # computed by a declared derivation


#: Modes in which nothing of the session is kept but shapes; what they restore well need not be stored.
STAND_INS = (Mode.FRESH, Mode.ZERO, Mode.DERIVED)


@dataclass(frozen=True)
class Trial:
    """How far a return was off.

    Attributes
    ----------
    distances
        Anchor -> distance; infinite where the return raised.
    errors
        Anchor -> what it raised.
    """

    distances: Mapping[int, float]
    errors: Mapping[int, str] = field(default_factory=dict)

    @property
    def worst(self) -> float:
        """Largest distance over all anchors."""
        return max(self.distances.values())


@dataclass(frozen=True)
class Point(Generic[Runtime]):
    """A session at one anchor: what it holds, and what it does next."""

    saved: tuple[Buffer, ...]
    fresh: Mapping[str, Buffer]
    foreign: Mapping[str, Buffer] | None
    outcome: Any


@dataclass(eq=False)
class Bench(Generic[Runtime]):
    """Trials of one runtime.

    Attributes
    ----------
    factory
        Gives a runtime that has read nothing.
    anchors, others
        Length -> what brings a fresh runtime to the state to keep, or to another session's.
    probe, distance
        What the runtime does next, and how far two of these are apart.
    group
        Name of the group that a buffer is replaced with.
    """

    factory: Callable[[], Runtime]
    anchors: Mapping[int, Callable[[Runtime], object]]
    probe: Callable[[Runtime], Any]
    distance: Callable[[Any, Any], float]
    others: Mapping[int, Callable[[Runtime], object]] = field(default_factory=dict)
    group: Callable[[BufferSpec], str] = lambda spec: spec.name

    def __post_init__(self) -> None:
        self.points: dict[int, Point[Runtime]] = {}
        noise = {}
        for length, anchor in self.anchors.items():
            # one session is probed without being saved before, so that saving cannot hide what it changes
            outcome = self.probe(self._at(anchor))
            once_more = self._at(anchor)
            saved = owned(once_more.buffers())
            noise[length] = self._distance(outcome, self.probe(once_more))
            foreign = None
            if length in self.others:
                foreign = {b.name: b for b in owned(self._at(self.others[length]).buffers())}
            self.points[length] = Point(saved, self._fresh(), foreign, outcome)
        self.noise = Trial(noise)
        self._done: dict[frozenset[tuple[str, Mode]], Trial] = {}

    def members(self) -> dict[str, tuple[str, ...]]:
        """Group -> names of its buffers."""
        found: dict[str, dict[str, None]] = {}
        for point in self.points.values():
            for buffer in point.saved:
                found.setdefault(self.group(buffer.spec), {})[buffer.name] = None
        return {group: tuple(names) for group, names in found.items()}

    def nbytes(self, group: str) -> dict[int, int]:
        """Anchor -> bytes of a group."""
        return {
            length: sum(buffer.spec.nbytes for buffer in self._of(point, group))
            for length, point in self.points.items()
        }

    def kinds(self, group: str) -> tuple[str, ...]:
        """Kinds that the buffers of a group declare."""
        found = {str(b.spec.kind) for point in self.points.values() for b in self._of(point, group)}
        return tuple(sorted(found))

    def new_has(self, group: str) -> bool:
        """Whether a new runtime gives every buffer of a group."""
        return all(
            buffer.name in point.fresh for point in self.points.values() for buffer in self._of(point, group)
        )

    def declared(self) -> set[str]:
        """Groups of which every buffer has a declared derivation."""
        runtime = self.factory()
        known: tuple[Derivation, ...] = tuple(runtime.derivations()) if isinstance(runtime, Deriving) else ()
        members = self.members()
        return {g for g, names in members.items() if all(any(d.gives(n) for d in known) for n in names)}

    def trial(self, replaced: Mapping[str, Mode]) -> Trial:
        """Restore at every anchor with the groups in `replaced` replaced and the others as they were saved."""
        key = frozenset(replaced.items())
        if key not in self._done:
            distances, errors = {}, {}
            for length, point in self.points.items():
                try:
                    distances[length] = self._return(point, replaced)
                # whatever a runtime raises here says that this return is impossible
                except Exception as error:
                    distances[length] = math.inf
                    errors[length] = f"{type(error).__name__}: {error}"
            self._done[key] = Trial(distances, errors)
        return self._done[key]

    def sources(self, group: str, replaced: Mapping[str, Mode]) -> tuple[str, ...]:
        """Groups that `group` is derived from in a trial that worked."""
        point = next(point for point in self.points.values() if self._of(point, group))
        _, read = self._built(point, replaced)
        names = {source for buffer in self._of(point, group) for source in read.get(buffer.name, ())}
        return tuple(sorted({self.group(b.spec) for b in point.saved if b.name in names}))

    def _return(self, point: Point[Runtime], replaced: Mapping[str, Mode]) -> float:
        buffers, _ = self._built(point, replaced)
        runtime = self.factory()
        runtime.load(random_last(owned(buffers.values())))  # it may keep them, and write into them
        return self._distance(point.outcome, self.probe(runtime))

    def _built(
        self, point: Point[Runtime], replaced: Mapping[str, Mode]
    ) -> tuple[dict[str, Buffer], dict[str, tuple[str, ...]]]:
        """The buffers of a return by name, and what each derived one was read from."""
        kept: dict[str, Buffer] = {}
        missing = []
        for buffer in point.saved:
            mode = replaced.get(self.group(buffer.spec))
            stand_in: Buffer | None = buffer
            if mode is Mode.DERIVED:
                missing.append(buffer.name)
                stand_in = None
            elif mode is Mode.ZERO:
                stand_in = dataclasses.replace(buffer, data=np.zeros_like(buffer.data))
            elif mode is Mode.FRESH:
                stand_in = point.fresh.get(buffer.name)
            elif mode is Mode.FOREIGN:
                stand_in = (point.foreign or {}).get(buffer.name)
            if stand_in is not None:
                kept[buffer.name] = stand_in
        # derived in a runtime of its own, so that nothing which that leaves behind helps the return
        if not missing:
            return kept, {}
        sources = {buffer.name: buffer for buffer in owned(kept.values())}
        found, read = derived(self.factory(), sources, missing)
        return kept | found, read

    def _of(self, point: Point[Runtime], group: str) -> list[Buffer]:
        return [buffer for buffer in point.saved if self.group(buffer.spec) == group]

    def _at(self, anchor: Callable[[Runtime], object]) -> Runtime:
        runtime = self.factory()
        anchor(runtime)
        return runtime

    def _fresh(self) -> dict[str, Buffer]:
        try:
            return {buffer.name: buffer for buffer in owned(self.factory().buffers())}
        except StatebridgeError:  # a runtime that says it has nothing to give yet
            return {}

    def _distance(self, one: Any, other: Any) -> float:
        found = float(self.distance(one, other))
        return math.inf if math.isnan(found) else found


def owned(buffers: Iterable[Buffer]) -> tuple[Buffer, ...]:
    """Buffers with memory of their own, which the session's next step cannot change."""
    return tuple(dataclasses.replace(buffer, data=buffer.data.copy()) for buffer in buffers)
