"""What a run would do, as tables: stages, documents, passes, tokens, bytes and time, and no weight loaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from statebridge.reproduce.config import SuiteConfig
from statebridge.reproduce.plan import Expected, Sizes, expect, total
from statebridge.reproduce.stages import stages_of
from statebridge.reproduce.suite import size

#: Columns of what is read, and of what is held: two tables, because one would not fit into a terminal of 80 columns.
READ = (
    "stage",
    "docu-\nments",
    "source\npasses",
    "source\ntokens",
    "receiver\npasses",
    "receiver\ntokens",
    "with\ngradients",
)
HELD = ("stage", "on the device", "on disk", "time")


@dataclass(frozen=True)
class DryRun:
    """The plan of a run.

    Attributes
    ----------
    stages
        Stage -> what it will take, in order.
    whole
        All of them together.
    sizes
        Sizes of both models.
    config
        Settings.
    """

    stages: dict[str, Expected]
    whole: Expected
    sizes: Sizes
    config: SuiteConfig

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain data."""
        return {
            "stages": {name: self._with_time(stage) for name, stage in self.stages.items()},
            "total": self._with_time(self.whole),
            "models": {
                end: dataclasses.asdict(getattr(self.sizes, end))
                | {"name": getattr(self.config.models, end)}
                | {"state_bytes_at_prefix": getattr(self.sizes, end).state_bytes(self.config.e001.prefix)}
                for end in ("source", "receiver")
            },
        }

    def read(self) -> list[tuple[str, ...]]:
        """Documents, passes and tokens: one row per stage and one for all, in the order of `READ`."""
        counts = (
            "documents",
            "source_passes",
            "source_tokens",
            "receiver_passes",
            "receiver_tokens",
            "trained_tokens",
        )
        return [
            (name, *(f"{getattr(stage, count):,}" if getattr(stage, count) else "" for count in counts))
            for name, stage in self._rows()
        ]

    def held(self) -> list[tuple[str, ...]]:
        """Bytes and time: one row per stage and one for all, in the order of `HELD`."""
        return [
            (
                name,
                *(size(value) if value else "" for value in (stage.device_bytes, stage.disk_bytes)),
                _time(stage.seconds(self.config)),
            )
            for name, stage in self._rows()
        ]

    def notes(self) -> list[str]:
        """What the table does not say."""
        lines, prefix = [], self.config.e001.prefix
        for end in ("source", "receiver"):
            found = getattr(self.sizes, end)
            lines.append(
                f"{end}: {getattr(self.config.models, end)}, {found.parameters:,} parameters, "
                f"{size(found.weight_bytes)}; a state of {prefix:,} tokens takes {found.state_bytes(prefix):,} bytes"
            )
        lines.append(
            "Memory on the device: weights, states and logits; activations come on top. Disk: a stage's files at "
            "their largest; the total is that of the largest stage, because scratch files are removed."
        )
        lines.append(
            "Calibration may stop earlier, and the longer prefix runs only behind its gate. Recall, generation and "
            "the restore control's further checks are not counted."
        )
        lines.append(
            "Time: unknown; give tokens per second with throughput.source and throughput.receiver."
            if self.whole.seconds(self.config) is None
            else "Time: of forward passes; the solving of maps and the disk come on top."
        )
        return lines

    def _rows(self) -> list[tuple[str, Expected]]:
        return [*self.stages.items(), ("total", self.whole)]

    def _with_time(self, stage: Expected) -> dict[str, Any]:
        return dataclasses.asdict(stage) | {"seconds": stage.seconds(self.config)}


def dry_run(config: SuiteConfig, experiment: str) -> DryRun:
    """The plan of "e001", "e002" or "all"."""
    sizes = Sizes.of(config)
    found = expect(config, sizes)
    stages = {stage.name: found[stage.name] for stage in stages_of(config, experiment)}
    return DryRun(stages, total(stages), sizes, config)


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"
