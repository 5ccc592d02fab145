"""Return consistency: excursions that any runtime must come back from, and impostors that it must not be."""

from statebridge.sessions.conformance.excursions import (
    EXCURSIONS,
    AnotherProcess,
    DisturbedProcess,
    Eviction,
    Excursion,
    Fork,
    OtherSessions,
    OtherText,
)
from statebridge.sessions.conformance.impostors import (
    IMPOSTORS,
    Altered,
    Drifted,
    Foreign,
    Impostor,
    Stale,
    WrongRandom,
)
from statebridge.sessions.conformance.setting import Setting
from statebridge.sessions.conformance.verdict import Case, Verdict, assert_conforms, conform

__all__ = [
    "EXCURSIONS",
    "IMPOSTORS",
    "Altered",
    "AnotherProcess",
    "Case",
    "DisturbedProcess",
    "Drifted",
    "Eviction",
    "Excursion",
    "Foreign",
    "Fork",
    "Impostor",
    "OtherSessions",
    "OtherText",
    "Setting",
    "Stale",
    "Verdict",
    "WrongRandom",
    "assert_conforms",
    "conform",
]
