"""Settings of an evaluation, gates included: they are written down before the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import ConfigDict

from statebridge.bridge.config import PLANS, DocumentsConfig

_STRICT = ConfigDict(extra="forbid")  # inside lists, where `load_config` cannot see a misspelt key


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

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    metric: str
    relation: Literal["<=", ">="]
    bound: float


@dataclass(frozen=True)
class RecallConfig:
    """The downstream task: made-up facts in the prefix, asked for after it. Off while `items_per_depth` is 0.

    Attributes
    ----------
    depths
        Tokens before the end of the prefix at which the asked fact stands.
    items_per_depth
        Questions of each depth.
    distractors
        Other facts in the same prefix.
    filler
        Prose around the facts; the scored documents when left out.
    """

    depths: tuple[int, ...] = (64, 256, 1024, 2048, 4000)
    items_per_depth: int = 0
    distractors: int = 7
    filler: DocumentsConfig | None = None


@dataclass(frozen=True)
class GenerationConfig:
    """Free-running generation after the bridge token. Off while `documents` is 0.

    Attributes
    ----------
    documents
        How many of the scored documents are continued, the first ones.
    new_tokens
        Tokens generated.
    temperature
        Of the sampled continuations; the random numbers are those of the seed, the same for every arm.
    """

    documents: int = 0
    new_tokens: int = 64
    temperature: float = 1.0


@dataclass(frozen=True)
class BranchConfig:
    """A further protocol, run after the main one, in a folder of its own.

    Attributes
    ----------
    name
        Name of the folder under `branches/`.
    prefix, targets, count
        Its lengths and number of documents; those of the main run where left out.
    behind
        Gate of the main run that must pass first.
    on_request
        Run it whatever the gate says; the result says that it was asked for.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    name: str
    prefix: int
    targets: int | None = None
    count: int | None = None
    behind: str = "near native"
    on_request: bool = False


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
        Plans scored besides the bridge's own; "all" for the eight combinations.
    windows, handover_windows
        W of the truncated reads, and of the hand-overs followed by the same W tokens.
    controls
        Control arms.
    recall, generation
        The downstream task and free-running generation; both off by default.
    branches
        Further protocols, each behind a gate.
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
    plans: tuple[str, ...] | Literal["all"] = ("DDD", "TDD", "TTT")
    windows: tuple[int, ...] = (1, 16, 64, 256, 1024)
    handover_windows: tuple[int, ...] = ()
    controls: tuple[str, ...] = ("source", "empty", "restore", "kv only", "wrong donor")
    recall: RecallConfig = field(default_factory=RecallConfig)
    generation: GenerationConfig = field(default_factory=GenerationConfig)
    branches: tuple[BranchConfig, ...] = ()
    resamples: int = 10_000
    seed: int = 0
    gates: dict[str, tuple[GateConfig, ...]] = field(default_factory=published_gates)

    @property
    def plan_names(self) -> tuple[str, ...]:
        """The plans to score, "all" spelt out."""
        return PLANS if self.plans == "all" else tuple(self.plans)
