"""Settings of an evaluation, gates included: they are written down before the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from statebridge.bridge.config import DocumentsConfig


@dataclass(frozen=True)
class GateConfig:
    """One named inequality.

    Attributes
    ----------
    metric
        Name of a measured interval, for example "excess", "ncr", "top1", "handover − source".
    relation, bound
        What the interval must satisfy: it passes when the whole interval does, fails when none of it does, and is
        inconclusive in between.
    """

    metric: str
    relation: Literal["<=", ">="]
    bound: float


def published_gates() -> dict[str, tuple[GateConfig, ...]]:
    """The gates of the published protocol: full state, and near native."""
    return {
        "full state": (
            GateConfig("handover − kv only", "<=", 0.0),
            GateConfig("handover − wrong donor", "<=", 0.0),
            GateConfig("handover − source", "<=", 0.0),
        ),
        "near native": (
            GateConfig("excess", "<=", 0.05),
            GateConfig("ncr", ">=", 0.95),
            GateConfig("top1", ">=", 0.90),
        ),
    }


@dataclass(frozen=True)
class EvaluateConfig:
    """Settings of `evaluate`.

    Attributes
    ----------
    documents
        Where documents come from.
    count, skip
        Documents that are scored, after the first `skip` long enough ones.
    prefix, targets
        Protocol lengths in tokens.
    batch_size
        Documents per forward pass; at least 2, so that each has another's state as its wrong donor.
    plans
        Plans scored besides the bridge's own.
    windows, handover_windows
        W of the truncated reads, and of the hand-overs followed by the same W tokens.
    controls
        Control arms.
    resamples, seed
        Of the paired bootstrap.
    gates
        Name -> inequalities that must all hold.
    """

    documents: DocumentsConfig = field(default_factory=DocumentsConfig)
    count: int = 64
    skip: int = 0
    prefix: int = 4096
    targets: int = 64
    batch_size: int = 4
    plans: tuple[str, ...] = ("DDD", "TDD", "TTT")
    windows: tuple[int, ...] = (1, 16, 64, 256, 1024)
    handover_windows: tuple[int, ...] = ()
    controls: tuple[str, ...] = ("source", "empty", "restore", "kv only", "wrong donor")
    resamples: int = 10_000
    seed: int = 0
    gates: dict[str, tuple[GateConfig, ...]] = field(default_factory=published_gates)
