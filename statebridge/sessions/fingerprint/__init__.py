"""Discover by measurement which buffers of a runtime are its state."""

from statebridge.sessions.fingerprint.bench import Mode, Trial
from statebridge.sessions.fingerprint.derivation import Derivation, Deriving
from statebridge.sessions.fingerprint.distances import max_difference, mean_divergence
from statebridge.sessions.fingerprint.fingerprint import Fingerprint
from statebridge.sessions.fingerprint.growth import Growth, growth_of
from statebridge.sessions.fingerprint.result import Finding, Role

__all__ = [
    "Derivation",
    "Deriving",
    "Finding",
    "Fingerprint",
    "Growth",
    "Mode",
    "Role",
    "Trial",
    "growth_of",
    "max_difference",
    "mean_divergence",
]
