"""What was found about one buffer: its role in a return, why, and the distances behind it. Knows no runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from statebridge.sessions.fingerprint.bench import Mode, Trial
from statebridge.sessions.fingerprint.growth import Growth


class Role(StrEnum):
    """What a buffer is to a return."""

    NEEDED = "needed"
    DERIVABLE = "derivable"  # computed again from what is needed
    SHAPE = "shape"  # zeros of its shape do
    SPARED = "spared"  # a new runtime has what is needed


_ROLE_OF = {Mode.FRESH: Role.SPARED, Mode.ZERO: Role.SHAPE, Mode.DERIVED: Role.DERIVABLE}


def role_of(mode: Mode | None) -> Role:
    """The role of a group that `mode` stands in for; None when nothing does."""
    return Role.NEEDED if mode is None else _ROLE_OF[mode]


@dataclass(frozen=True)
class Finding:
    """One buffer, or one group of buffers that was replaced as a whole.

    Attributes
    ----------
    name, members, kinds
        The group, its buffers, and the kinds they declare.
    nbytes
        Anchor -> bytes.
    growth
        Class of `nbytes` over the anchors.
    role, reason
        What it is to a return, and the measurement that says so.
    trials
        Mode -> what replacing this group alone gave.
    without
        Of a needed group: the best that a stand-in gave when only the needed rest was restored.
    """

    name: str
    members: tuple[str, ...]
    kinds: tuple[str, ...]
    nbytes: Mapping[int, int]
    growth: Growth
    role: Role
    reason: str
    trials: Mapping[Mode, Trial]
    without: float | None = None

    @property
    def largest(self) -> int:
        """Bytes at the last anchor."""
        return self.nbytes[max(self.nbytes)]

    def to_json(self) -> dict[str, Any]:
        """The finding as one JSON object."""
        return {
            "name": self.name,
            "members": list(self.members),
            "kinds": list(self.kinds),
            "nbytes": {str(length): n for length, n in self.nbytes.items()},
            "growth": str(self.growth),
            "role": str(self.role),
            "reason": self.reason,
            "trials": {str(mode): trial_json(trial) for mode, trial in self.trials.items()},
            "without": None if self.without is None else number_json(self.without),
        }


def shown(distance: float) -> str:
    """A distance for readers."""
    if math.isinf(distance):
        return "∞"
    return "0" if distance == 0 else f"{distance:.3g}"


def trial_json(trial: Trial) -> dict[str, Any]:
    """A trial as JSON."""
    found: dict[str, Any] = {
        "distances": {str(length): number_json(distance) for length, distance in trial.distances.items()}
    }
    if trial.errors:
        found["errors"] = {str(length): error for length, error in trial.errors.items()}
    return found


def number_json(distance: float) -> float | str:
    """A distance as JSON, which has no infinity."""
    return "inf" if math.isinf(distance) else distance
