"""Return consistency: whoever leaves and comes back must match the session that never left; impostors must not.

    conforms ⇔ every excursion returns within eps, and every impostor is more than eps away

Knows excursions and impostors by what they give, and nothing about a runtime. Source: persistent computational state,
return-consistency conformance.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from statebridge.errors import FingerprintError
from statebridge.sessions.conformance.excursions import EXCURSIONS, Excursion
from statebridge.sessions.conformance.impostors import IMPOSTORS, Impostor
from statebridge.sessions.conformance.setting import Setting
from statebridge.sessions.fingerprint.bench import Runtime
from statebridge.sessions.fingerprint.distances import checked_eps
from statebridge.sessions.fingerprint.result import number_json, shown
from statebridge.sessions.store import SessionStore


@dataclass(frozen=True)
class Case:
    """One excursion or impostor.

    Attributes
    ----------
    name, impostor
        Which, and of what kind.
    distance
        From the session that never left; infinite when it raised.
    passed
        Returned, or was told apart.
    error
        What it raised.
    """

    name: str
    impostor: bool
    distance: float
    passed: bool
    error: str = ""


@dataclass(frozen=True)
class Verdict:
    """All cases, and the distance that decided them.

    Attributes
    ----------
    eps, noise
        Largest distance that counts as the same; distance between two sessions that never left.
    cases
        Excursions first, then impostors.
    """

    eps: float
    noise: float
    cases: tuple[Case, ...]

    @property
    def passed(self) -> bool:
        """Whether the runtime conforms."""
        return all(case.passed for case in self.cases)

    def to_json(self) -> dict[str, Any]:
        """Everything as one JSON object; an infinite distance is the string "inf"."""
        cases = [asdict(case) | {"distance": number_json(case.distance)} for case in self.cases]
        return {"eps": self.eps, "noise": self.noise, "passed": self.passed, "cases": cases}

    def markdown(self) -> str:
        """A table in Markdown."""
        lines = [f"| case | distance | wanted (eps {self.eps:g}) | verdict |", "| --- | --- | --- | --- |"]
        for case in self.cases:
            wanted = "more" if case.impostor else "at most eps"
            verdict = "pass" if case.passed else "FAIL"
            note = f" ({case.error})" if case.error else ""
            lines.append(f"| {case.name} | {shown(case.distance)}{note} | {wanted} | {verdict} |")
        return "\n".join(lines)


def conform(
    factory: Callable[[], Runtime],
    anchor: Callable[[Runtime], object],
    probe: Callable[[Runtime], Any],
    distance: Callable[[Any, Any], float],
    eps: float = 0.0,
    *,
    other: Callable[[Runtime], object],
    earlier: Callable[[Runtime], object],
    wander: Callable[[Runtime], object],
    path: Path | None = None,
    excursions: Iterable[Excursion] = EXCURSIONS,
    impostors: Iterable[Impostor] = IMPOSTORS,
) -> Verdict:
    """Put a runtime through excursions and impostors.

    Parameters
    ----------
    factory
        Gives a runtime that has read nothing; anything with `buffers()` and `load()`.
    anchor, other, earlier
        Bring a fresh runtime to the state to return to, to another session's, and to this session's before it
        came to the anchor.
    probe
        Lets a runtime go on and gives the outcome.
    distance
        How far two outcomes are apart; not a number counts as infinite.
    eps
        Largest distance that counts as the same; 0 asks for equality.
    wander
        Lets a runtime go on with something else.
    path
        Folder for the store; a temporary one when left out.
    excursions, impostors
        The cases.

    Raises
    ------
    FingerprintError
        When two sessions that never left differ by more than eps, or a case does not fit the runtime.
    """
    checked_eps(eps)
    excursions, impostors = tuple(excursions), tuple(impostors)
    if not (excursions or impostors):
        raise FingerprintError(
            "There is no excursion and no impostor, so nothing would be tested; give some."
        )
    with ExitStack() as stack:
        folder = path or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        setting = Setting(factory, anchor, other, earlier, wander, probe, SessionStore(folder))
        never_left = probe(setting.at(anchor))
        noise = _number(distance(never_left, probe(setting.at(anchor))))
        if noise > eps:
            raise FingerprintError(
                f"Two sessions that never left are {shown(noise)} apart, more than eps = {eps:g}: the runtime "
                "does not repeat itself; seed what it draws from in the factory, or give a larger eps."
            )

        def tried(come_back: Callable[[], Any]) -> tuple[float, str]:
            try:
                return _number(distance(never_left, come_back())), ""
            except FingerprintError:
                raise
            # whatever a runtime raises here is its answer to the case
            except Exception as error:
                return math.inf, f"{type(error).__name__}: {error}"

        cases = []
        for excursion in excursions:
            found, error = tried(functools.partial(excursion, setting))
            cases.append(Case(excursion.name, False, found, found <= eps, error))
        for impostor in impostors:
            # made outside: an impostor that cannot be made was not told apart
            buffers = list(impostor(setting))
            found, error = tried(functools.partial(setting.outcome, buffers))
            cases.append(Case(impostor.name, True, found, found > eps, error))
    return Verdict(eps, noise, tuple(cases))


def assert_conforms(*args: Any, **options: Any) -> Verdict:
    """`conform` for tests: the verdict, or an AssertionError that lists every case."""
    verdict = conform(*args, **options)
    if not verdict.passed:
        raise AssertionError(f"the runtime does not conform\n{verdict.markdown()}")
    return verdict


def _number(found: float) -> float:
    return math.inf if math.isnan(found) else float(found)
