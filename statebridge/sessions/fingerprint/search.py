"""The search for the smallest state that is enough.

1. Two sessions that never left must agree within eps; else nothing can be measured.
2. All buffers restored into a fresh runtime must agree too; else state hides outside the buffers.
3. Each group alone is replaced: by what a new runtime has, by zeros, by its declared derivation, and by another
   session's. It can be spared when one of the first three returns within eps at every anchor.
4. All groups that can be spared are replaced at once. Where that fails they stood in for each other: then none is
   believed, and group after group is dropped, largest first, as long as the return holds.
5. Dropping goes on until taking any further group away breaks the return.

Knows a bench of trials, and nothing about what is tried. Source: persistent computational state, discovery.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from statebridge.errors import FingerprintError
from statebridge.sessions.fingerprint.bench import STAND_INS, Bench, Mode, Trial
from statebridge.sessions.fingerprint.growth import growth_of
from statebridge.sessions.fingerprint.result import Finding, Role, role_of, shown


class Search:
    """Which groups can be spared, and what stands in for them.

    Parameters
    ----------
    bench
        The trials.
    eps
        Largest distance that counts as the same.
    derive
        Try declared derivations.

    Attributes
    ----------
    alone
        Group -> mode -> the trial with this group alone replaced.
    spared
        Group -> what stands in for it in the return that keeps only what is needed.
    greedy
        Whether groups stood in for each other.

    Raises
    ------
    FingerprintError
        When nothing can be measured (steps 1 and 2).
    """

    def __init__(self, bench: Bench[Any], eps: float, derive: bool = True) -> None:
        self.bench, self.eps = bench, eps
        self._require_sound()
        self.members = bench.members()
        self.nbytes = {name: bench.nbytes(name) for name in self.members}
        #: Most bytes at the last anchor first.
        self.order = sorted(self.members, key=lambda name: (-list(self.nbytes[name].values())[-1], name))
        declared = bench.declared() if derive else set()
        self.modes = {
            name: [mode for mode in STAND_INS if mode is not Mode.DERIVED or name in declared]
            for name in self.order
        }
        self.alone = {name: self._alone(name) for name in self.order}
        self.spared_alone = {
            name: mode
            for name, trials in self.alone.items()
            if (mode := self._within(trials, self.modes[name])) is not None
        }
        self.greedy = bench.trial(self.spared_alone).worst > eps
        self.spared = self._dropped({} if self.greedy else self.spared_alone)

    def findings(self) -> tuple[Finding, ...]:
        """Every group with its role and reason, most bytes first."""
        found = []
        for name in self.order:
            without = None
            if name not in self.spared:
                tried = (self.bench.trial(self.spared | {name: mode}) for mode in self.modes[name])
                without = min(trial.worst for trial in tried)
            found.append(
                Finding(
                    name=name,
                    members=self.members[name],
                    kinds=self.bench.kinds(name),
                    nbytes=self.nbytes[name],
                    growth=growth_of(self.nbytes[name]),
                    role=role_of(self.spared.get(name)),
                    reason=self._reason(name, without),
                    trials=self.alone[name],
                    without=without,
                )
            )
        return tuple(found)

    def _require_sound(self) -> None:
        noise, whole = self.bench.noise, self.bench.trial({})
        if noise.worst > self.eps:
            raise FingerprintError(
                f"Two sessions that never left are {shown(noise.worst)} apart, more than eps = {self.eps:g}: the "
                "runtime does not repeat itself; seed what it draws from in the factory, or give a larger eps."
            )
        if whole.worst > self.eps:
            why = "".join(f" ({error})" for error in list(whole.errors.values())[:1])
            raise FingerprintError(
                f"With all buffers restored, a fresh runtime is {shown(whole.worst)} from the session that never "
                f"left, more than eps = {self.eps:g}{why}: the runtime keeps state outside its buffers; make a "
                "buffer of it, or let load() put it back."
            )

    def _alone(self, name: str) -> dict[Mode, Trial]:
        """A derivation is tried only where nothing cheaper does."""
        trials: dict[Mode, Trial] = {}
        for mode in self.modes[name]:
            if mode is not Mode.DERIVED or self._within(trials, trials) is None:
                trials[mode] = self.bench.trial({name: mode})
        if self.bench.others:
            trials[Mode.FOREIGN] = self.bench.trial({name: Mode.FOREIGN})
        return trials

    def _within(self, trials: Mapping[Mode, Trial], modes: Iterable[Mode]) -> Mode | None:
        return next((mode for mode in modes if mode in trials and trials[mode].worst <= self.eps), None)

    def _dropped(self, spared: Mapping[str, Mode]) -> dict[str, Mode]:
        """Drop group after group while the return holds, until no further one can be dropped."""
        found, changed = dict(spared), True
        while changed:
            changed = False
            for name in (name for name in self.order if name not in found):
                for mode in self.modes[name]:
                    if self.bench.trial(found | {name: mode}).worst <= self.eps:
                        found[name], changed = mode, True
                        break
        return found

    def _reason(self, name: str, without: float | None) -> str:
        """One sentence about why this group has its role."""
        role, trials = role_of(self.spared.get(name)), self.alone[name]
        if without is not None:
            if name in self.spared_alone:
                return f"{self._hidden_by(name)}: without it the return is {shown(without)} off"
            stopped = _stopped(trials.get(Mode.DERIVED), self.eps)
            if trials[Mode.FRESH].errors and trials[Mode.ZERO].errors:
                error = next(iter(trials[Mode.FRESH].errors.values()))
                return f"the runtime refuses to return without it ({error}){stopped}"
            return f"without it the return is {shown(without)} off{stopped}"
        if role is Role.DERIVABLE:
            return f"computed again from {', '.join(self.bench.sources(name, self.spared))}"
        if pair := self._stands_in(name):
            return f"{', '.join(pair)} stands in for it"
        if role is Role.SHAPE:
            return "its shape is enough: zeros do as well"
        if all(trial.worst <= self.eps for trial in trials.values()):
            return "nothing in its place changes the return"
        return (
            "a new runtime has it already" if self.bench.new_has(name) else "a new runtime goes on without it"
        )

    def _hidden_by(self, name: str) -> str:
        """Why a needed group could be spared alone."""
        if pair := self._stands_in(name):
            return f"spared alone, because {', '.join(pair)} can stand in for it, and that is gone"
        derived = [group for group, mode in self.spared.items() if mode is Mode.DERIVED]
        if users := [group for group in derived if name in self.bench.sources(group, self.spared)]:
            return f"spared alone, but {', '.join(users)} are computed again from it"
        return "spared alone, but not once others are gone"

    def _stands_in(self, name: str) -> list[str]:
        """Groups that this one could change places with: kept ones for a spared one, and the reverse."""
        if not self.greedy or name not in self.spared_alone:
            return []
        found = []
        for peer in self.order:
            if peer in self.spared_alone and (peer in self.spared) != (name in self.spared):
                kept, gone = (name, peer) if name in self.spared else (peer, name)
                swapped = {group: mode for group, mode in self.spared.items() if group != kept}
                swapped[gone] = self.spared_alone[gone]
                if self.bench.trial(swapped).worst <= self.eps:
                    found.append(peer)
        return found


def _stopped(trial: Trial | None, eps: float) -> str:
    """Where a declared derivation does not hold."""
    if trial is None:
        return ""
    held = [str(length) for length, distance in trial.distances.items() if distance <= eps]
    first, off = next((n, distance) for n, distance in trial.distances.items() if distance > eps)
    holds = f"holds at {', '.join(held)} and " if held else ""
    why = f" ({trial.errors[first]})" if first in trial.errors else ""
    return f"; its declared derivation {holds}is {shown(off)} off at {first}{why}"
