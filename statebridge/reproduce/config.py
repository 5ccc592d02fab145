"""Settings of the whole reproduction: the settings of its stages, put together.

Every document set is the one of the stage that uses it (`fit.documents`, `selection.documents`, …), and every number
of documents is that stage's. Sets that name the same source take consecutive documents of it, so that no
document is in two of them. Knows settings, no models and no files.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from statebridge.bridge import PLANS, CalibrateConfig, DocumentsConfig, FitConfig
from statebridge.errors import ConfigError
from statebridge.evaluate.arms import Protocol
from statebridge.evaluate.config import EvaluateConfig, published_gates
from statebridge.reproduce.config_parts import (
    LongConfig,
    ModelsConfig,
    RestoreConfig,
    ShiftedConfig,
    ThroughputConfig,
)


def _e001() -> EvaluateConfig:
    # whether a hand-over beats the source is asked of the calibrated one, in experiment 2
    gates = published_gates()["full state"]
    own = tuple(gate for gate in gates if gate.metric != "handover − source")
    return EvaluateConfig(plans="all", windows=(), gates={"full state": own}, seed=2026083103)


def _selection() -> EvaluateConfig:
    return EvaluateConfig(count=32, plans="all", windows=(), controls=(), gates={}, seed=2026090103)


@dataclass(frozen=True)
class SuiteConfig:
    """Settings of `reproduce`.

    Attributes
    ----------
    models
        The pair.
    restore
        The restore control.
    fit
        Experiment 1's fit of all maps.
    e001
        Experiment 1's evaluation, of full translation (plan TTT).
    selection
        Experiment 2's scores of the eight plans on validation documents.
    tie_width
        Excess, in nats, by which a plan may miss the best one and still count as a tie.
    calibrate
        Experiment 2's calibrator, trained on the fit documents and stopped on those of the selection.
    e002
        Experiment 2's evaluation, of the calibrated bridge.
    shifted
        Name -> a test set of another domain.
    long
        The branch with a longer prefix.
    throughput
        For the expected time.
    """

    models: ModelsConfig = field(default_factory=ModelsConfig)
    restore: RestoreConfig = field(default_factory=RestoreConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    e001: EvaluateConfig = field(default_factory=_e001)
    selection: EvaluateConfig = field(default_factory=_selection)
    tie_width: float = 0.01
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    e002: EvaluateConfig = field(default_factory=lambda: EvaluateConfig(plans="all", seed=2026090103))
    shifted: dict[str, ShiftedConfig] = field(default_factory=dict)
    long: LongConfig | None = None
    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)

    def __post_init__(self) -> None:
        """Refuse stages that contradict each other."""
        if self.models.load == "sequential":
            self._require_turns()
        for name in ("e001", "selection", "e002"):
            if getattr(self, name).branches:
                raise ConfigError(f"{name}.branches: the suite has one branch, behind e002; set `long`.")
        if set(self.selection.plan_names) != set(PLANS):
            raise ConfigError('selection.plans must be "all": the choice is among all eight plans.')
        if self.long and not self.long.on_request and self.long.behind not in self.e002.gates:
            raise ConfigError(
                f"long.behind names the gate {self.long.behind!r}, which e002 does not have; name one of "
                f"{', '.join(self.e002.gates)}, or set long.on_request."
            )
        if clash := sorted(set(self.shifted) & {"fit", "selection", "e001", "e002", "long"}):
            raise ConfigError(f"shifted: {clash[0]!r} is the name of another set; choose another.")

    def _require_turns(self) -> None:
        """Refuse what needs both models at once."""
        wrong = [
            f"{name}.{part}"
            for name in ("e001", "selection", "e002")
            for part, asked in (
                ("recall", getattr(self, name).recall.items_per_depth),
                ("generation", getattr(self, name).generation.documents),
            )
            if asked
        ]
        wrong += [f"calibrate.states {self.calibrate.states}"] if self.calibrate.needs_both_models else []
        if wrong:
            raise ConfigError(
                f"{', '.join(wrong)}: needs both models on their devices; leave it out, or load them together."
            )

    def sets(self) -> dict[str, SetRequest]:
        """Name -> what is drawn for it, in the order of drawing."""
        longest = max(
            *self.fit.checkpoints,
            self.calibrate.prefix + self.calibrate.positions,
            max(self.restore.lengths) + 8,
        )
        fit = self.fit
        found = {
            "fit": SetRequest(
                fit.documents, fit.validation_documents + fit.fit_documents, longest, 0, fit.seed
            )
        }
        for name in ("selection", "e001", "e002"):
            found[name] = _request(getattr(self, name))
        # the calibrator is stopped on the selection's documents
        needed = max(found["selection"].length, self.calibrate.prefix + self.calibrate.positions)
        found["selection"] = dataclasses.replace(found["selection"], length=needed)
        if self.long is not None:
            found["long"] = _request(self.long_settings(self.long))
        for name in self.shifted:
            found[name] = _request(self.shifted_settings(name))
        return found

    def long_settings(self, long: LongConfig) -> EvaluateConfig:
        """Settings of the branch: those of experiment 2 with its prefix and documents."""
        return dataclasses.replace(
            self.e002, documents=long.documents, prefix=long.prefix, count=long.count, skip=0
        )

    def shifted_settings(self, name: str) -> EvaluateConfig:
        """Settings of a shifted set: those of experiment 2 with its documents."""
        shifted = self.shifted[name]
        return dataclasses.replace(self.e002, documents=shifted.documents, count=shifted.count, skip=0)


@dataclass(frozen=True)
class SetRequest:
    """Documents to draw: `count` of at least `length` tokens, after `skip` such documents of their source."""

    documents: DocumentsConfig
    count: int
    length: int
    skip: int
    seed: int


def _request(config: EvaluateConfig) -> SetRequest:
    length = Protocol(config.prefix, config.targets).length
    return SetRequest(config.documents, config.count, length, config.skip, config.seed)


def with_sources(config: SuiteConfig, sources: dict[str, str]) -> SuiteConfig:
    """The same settings with other sources of documents, by the name of the set.

    Raises
    ------
    ConfigError
        When there is no such set.
    """
    for name, source in sources.items():
        if name not in config.sets():
            raise ConfigError(
                f"--documents {name}={source}: there is no set {name!r}; sets are {', '.join(config.sets())}."
            )
        old: Any = config.shifted[name] if name in config.shifted else getattr(config, name)
        # what named a dataset of the hub does not belong to the new source
        documents = dataclasses.replace(
            old.documents, source=source, name=None, split="train", revision=None, id_field=None
        )
        moved = dataclasses.replace(old, documents=documents)
        if name in config.shifted:
            config = dataclasses.replace(config, shifted={**config.shifted, name: moved})
        else:
            changes: dict[str, Any] = {name: moved}
            config = dataclasses.replace(config, **changes)
    return config
