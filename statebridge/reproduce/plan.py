"""What a run will do, before it does it: documents, tokens and passes of each model, bytes, time.

    time = source tokens / source's tokens per second + receiver tokens / receiver's + passes · least time of a pass
           + bytes of states read again / bytes per second

A token or a pass with gradients counts as three. Sizes come from configs on the meta device, so that no weight is
loaded. The counts are exact for what is listed; recall, free-running generation and the further checks of the restore
control come on top, and so do activations of the forward passes in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from statebridge.capture.shapes import ModelSize, size_of
from statebridge.evaluate.arms import batches
from statebridge.evaluate.config import EvaluateConfig
from statebridge.evaluate.restore_control import NEXT_TOKENS
from statebridge.evaluate.sections import RESIDUAL_DOCUMENTS
from statebridge.reproduce.config import SuiteConfig

_LIVE_STATES = 4  # of an evaluation: the source's, the native cache, the translated one and its cache
_TRAINING_STATES = 6  # base, calibrated, cache, and what the backward pass keeps of them


@dataclass(frozen=True)
class Expected:
    """What a stage will take.

    Attributes
    ----------
    documents
        Documents that it reads.
    source_passes, source_tokens, receiver_passes, receiver_tokens
        Forward passes of each model, and tokens in them over all rows.
    trained_passes, trained_tokens
        Those of the receiver's passes that have gradients, at most, and tokens in them.
    device_bytes
        Weights, states and logits on the device.
    disk_bytes
        Files of the stage at their largest.
    read_bytes
        Stored states that are read again, all readings together, at most.
    """

    documents: int = 0
    source_passes: int = 0
    source_tokens: int = 0
    receiver_passes: int = 0
    receiver_tokens: int = 0
    trained_passes: int = 0
    trained_tokens: int = 0
    device_bytes: int = 0
    disk_bytes: int = 0
    read_bytes: int = 0

    def seconds(self, config: SuiteConfig) -> float | None:
        """Expected time from the throughput table; None where it says nothing."""
        speed = config.throughput
        if not speed.source or not speed.receiver:
            return None
        read = self.receiver_tokens + 3 * self.trained_tokens
        passes = (self.source_passes + self.receiver_passes + 2 * self.trained_passes) * speed.pass_seconds
        reading = self.read_bytes / speed.state_bytes
        return self.source_tokens / speed.source + read / speed.receiver + passes + reading


@dataclass(frozen=True)
class Sizes:
    """Sizes of both models, and how they are held."""

    source: ModelSize
    receiver: ModelSize
    together: bool = True

    @classmethod
    def of(cls, config: SuiteConfig) -> Sizes:
        """Measure both models of a run on the meta device."""
        models = config.models
        return cls(
            size_of(models.source, models.dtype, models.source_revision),
            size_of(models.receiver, models.dtype, models.receiver_revision),
            models.load == "together",
        )

    @property
    def weights(self) -> int:
        """Bytes of weights that are on the device at once."""
        both = (self.source.weight_bytes, self.receiver.weight_bytes)
        return sum(both) if self.together else max(both)


def expect(config: SuiteConfig, sizes: Sizes) -> dict[str, Expected]:
    """Stage -> what it will take, for every stage of both experiments."""
    fit, calibrated = config.fit, True
    found = {"documents": _documents(config), "restore": _restore(config, sizes), "fit": _fit(config, sizes)}
    found["e001"] = _evaluation(config.e001, sizes, "TTT", not calibrated)
    found["selection"] = _evaluation(config.selection, sizes, fit.plan, not calibrated)
    found["calibrate"] = _calibrate(config, sizes)
    # the plan is not chosen yet; it is one of the eight, so that it adds no arm where all are scored
    found["e002"] = _evaluation(config.e002, sizes, fit.plan, calibrated)
    for name in config.shifted:
        found[f"shifted/{name}"] = _evaluation(config.shifted_settings(name), sizes, fit.plan, calibrated)
    if config.long is not None:
        found["long"] = _evaluation(config.long_settings(config.long), sizes, fit.plan, calibrated)
    return found


def total(stages: Mapping[str, Expected]) -> Expected:
    """All stages together: counts add up, memory is that of the largest, scratch files are gone between them."""
    every = list(stages.values())
    counts = (
        "source_passes",
        "source_tokens",
        "receiver_passes",
        "receiver_tokens",
        "trained_passes",
        "trained_tokens",
        "read_bytes",
    )
    return Expected(
        documents=sum(stage.documents for name, stage in stages.items() if name == "documents"),
        device_bytes=max((stage.device_bytes for stage in every), default=0),
        disk_bytes=max((stage.disk_bytes for stage in every), default=0),
        **{name: sum(getattr(stage, name) for stage in every) for name in counts},
    )


def _documents(config: SuiteConfig) -> Expected:
    sets = config.sets().values()
    return Expected(
        documents=sum(request.count for request in sets),
        disk_bytes=sum(4 * request.count * request.length for request in sets),
    )


def _restore(config: SuiteConfig, sizes: Sizes) -> Expected:
    control = config.restore
    cells = control.contexts * len(control.lengths)
    tokens = control.contexts * sum(length + 2 * NEXT_TOKENS for length in control.lengths)
    longest = max(control.lengths)
    state = max(model.state_bytes(longest) for model in (sizes.source, sizes.receiver))
    return Expected(
        control.contexts, 3 * cells, tokens, 3 * cells, tokens, device_bytes=sizes.weights + 3 * state
    )


def _fit(config: SuiteConfig, sizes: Sizes) -> Expected:
    fit = config.fit
    documents = fit.validation_documents + fit.fit_documents
    groups = sum(-(-count // fit.batch_size) for count in (fit.validation_documents, fit.fit_documents))
    passes, tokens = groups * len(fit.checkpoints), documents * sum(fit.checkpoints)
    longest = max(fit.checkpoints)
    states = sizes.source.state_bytes(longest) + sizes.receiver.state_bytes(longest)
    matrices = sizes.source.recurrent_values + sizes.receiver.recurrent_values
    on_disk = 4 * documents * len(fit.checkpoints) * matrices
    # the solving holds the R matrices of one layer at a time, and at most as much again beside them
    solving = 2 * on_disk // max(sizes.receiver.recurrent_layers, 1)
    group = 1 if sizes.together else len(fit.checkpoints)  # models that take turns read all lengths at once
    return Expected(
        documents,
        passes,
        tokens,
        passes,
        tokens,
        device_bytes=sizes.weights + max((1 + group) * fit.batch_size * states, solving),
        disk_bytes=on_disk,
    )


def _evaluation(config: EvaluateConfig, sizes: Sizes, plan: str, calibrated: bool) -> Expected:
    length, scored = config.prefix, config.targets
    controls, count = set(config.controls), config.count
    steps = len(batches(count, config.batch_size))
    bridges = len({plan, *config.plan_names}) + calibrated
    after = config.handover_windows
    source_each = length + scored * ("source" in controls) + sum(length - window for window in after)
    short = bridges + len(controls & {"restore", "empty", "kv only", "gdn only"})
    short += ("wrong donor" in controls) * (1 + calibrated)
    reread = (*config.windows, *after)
    receiver_each = length + scored + short * scored + sum(window + scored for window in reread)
    residuals = min(RESIDUAL_DOCUMENTS, count) if calibrated else 0
    states = sizes.source.state_bytes(length) + (_LIVE_STATES - 1) * sizes.receiver.state_bytes(length)
    logits = 2 * scored * sizes.receiver.vocab * (sizes.receiver.logit_bytes + 8)  # and their log-softmax
    return Expected(
        documents=count,
        source_passes=steps * (1 + ("source" in controls) + len(after))
        + (len(batches(residuals, config.batch_size)) if residuals else 0),
        source_tokens=count * source_each + residuals * length,
        receiver_passes=steps * (2 + short + ("empty" in controls) + 2 * len(reread)),
        receiver_tokens=count * receiver_each,
        device_bytes=sizes.weights + config.batch_size * (states + logits),
        disk_bytes=count * scored * (bridges + short + len(reread)) * 100,  # twice a row of scores
    )


def calibration_rounds(config: SuiteConfig) -> tuple[int, int]:
    """Steps of the calibrator over all grid points, and readings of the validation documents, both at most."""
    settings = config.calibrate
    points = len(settings.ranks) * len(settings.penalties)
    judged = points * (1 + -(-settings.max_steps // settings.evaluate_every))
    judged += 2 + (len(settings.components) if len(settings.components) > 1 else 0)
    return points * settings.max_steps, judged


def _calibrate(config: SuiteConfig, sizes: Sizes) -> Expected:
    settings, fit = config.calibrate, config.fit.fit_documents
    validation, width = config.selection.count, settings.positions
    documents, (steps, judged) = fit + validation, calibration_rounds(config)
    in_steps, in_validation, in_fit = (
        -(-count // settings.micro_batch) for count in (settings.batch_size, validation, fit)
    )
    passes = judged * in_validation + steps * in_steps
    readings = judged * validation + steps * settings.batch_size  # of states, one document each
    again = settings.states == "recompute"
    state = sizes.receiver.state_bytes(settings.prefix)
    logits = width * sizes.receiver.vocab * sizes.receiver.logit_bytes
    on_disk, on_device = (documents * state * (settings.states == place) for place in ("disk", "device"))
    return Expected(
        documents=documents,
        source_passes=in_fit + in_validation + passes * again,
        source_tokens=(documents + readings * again) * settings.prefix,
        receiver_passes=2 * (in_fit + in_validation) + passes,
        receiver_tokens=documents * (settings.prefix + width) + judged * validation * width,
        trained_passes=steps * in_steps,
        trained_tokens=steps * settings.batch_size * width,
        device_bytes=sizes.weights
        + settings.micro_batch * (_TRAINING_STATES * state + 6 * logits)
        + on_device,
        disk_bytes=documents * logits + on_disk,
        read_bytes=readings * state if on_disk else 0,
    )
