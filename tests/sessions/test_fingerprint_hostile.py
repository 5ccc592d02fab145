"""Discovery against runtimes that write into what they were given, and questions that mean nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest

from statebridge.errors import FingerprintError
from statebridge.sessions import Buffer, BufferKind
from statebridge.sessions.conformance import conform
from statebridge.sessions.fingerprint import Derivation, Fingerprint, max_difference


class Careless:
    """Keeps the very memory that it was given, and counts in it; derives its twin there as well."""

    def __init__(self) -> None:
        self.count, self.twice = np.zeros(3), np.zeros(3)

    def begin(self) -> None:
        self.count += (1, 2, 3)
        self.twice += 2 * self.count

    def probe(self) -> np.ndarray:
        self.count += 1
        self.twice += 1
        return np.concatenate((self.count, self.twice))

    def buffers(self) -> Iterable[Buffer]:
        yield Buffer.of("count", BufferKind.RECURRENT, self.count)
        yield Buffer.of("twice", BufferKind.RECURRENT, self.twice)

    def load(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            setattr(self, buffer.name, buffer.array())

    def derivations(self) -> Iterable[Derivation]:
        def derive(sources):
            count = sources["count"].array()
            count *= 2
            yield Buffer.of("twice", BufferKind.RECURRENT, count)

        yield Derivation(("twice",), ("count",), derive)


def test_a_runtime_that_writes_into_what_it_was_given_spoils_no_later_trial() -> None:
    found = Fingerprint.discover(Careless, Careless.begin, Careless.probe, max_difference)
    assert found.needed == ("count",)
    assert found["twice"].reason == "computed again from count"


def test_questions_that_mean_nothing_are_refused() -> None:
    def ask(anchor=Careless.begin, eps=0.0, **options):
        return Fingerprint.discover(Careless, anchor, Careless.probe, max_difference, eps, **options)

    cases = [
        (lambda: ask({}), "no anchor"),
        (
            lambda: ask({1: Careless.begin, 2: Careless.begin}, other=Careless.begin),
            r"lengths \[0\].*\[1, 2\]",
        ),
        (lambda: ask({1: Careless.begin}, other={2: Careless.begin}), r"lengths \[2\].*\[1\]"),
        (lambda: ask(eps=math.nan), "eps"),
        (lambda: ask(eps=-1.0), "eps"),
        (lambda: ask(eps=math.inf), "eps"),
    ]
    for attempt, message in cases:
        with pytest.raises(FingerprintError, match=message):
            attempt()


@pytest.mark.parametrize("eps", [math.nan, -1.0, math.inf])
def test_a_return_test_wants_a_distance_too(eps) -> None:
    nothing = {"other": Careless.begin, "earlier": lambda c: None, "wander": Careless.probe}
    with pytest.raises(FingerprintError, match="eps"):
        conform(Careless, Careless.begin, Careless.probe, max_difference, eps, **nothing)


def test_without_cases_nothing_conforms() -> None:
    nothing = {"other": Careless.begin, "earlier": lambda c: None, "wander": Careless.probe}
    with pytest.raises(FingerprintError, match="no excursion"):
        conform(
            Careless, Careless.begin, Careless.probe, max_difference, excursions=(), impostors=(), **nothing
        )
