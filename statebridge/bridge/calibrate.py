"""Fit a calibrator: residuals on top of a bridge's plan, trained through the frozen receiver.

    KL(native receiver ‖ hand-over) over the whole vocabulary, mean over 9 output positions,
    + weight · identity penalty; Adam; rank and weight by validation KL, early stop

The result is a bridge that carries the best calibrator of the grid and a report: curves, the ablation of each
component, residual norms. Source: arXiv 2609.25053, experiment 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from statebridge.bridge.backward import choose_backward
from statebridge.bridge.bridge import Bridge
from statebridge.bridge.calibrate_documents import CalibrationDocuments
from statebridge.bridge.calibrate_train import Trainer
from statebridge.bridge.collect import Progress, claim_folder, model_fingerprint, sole_run
from statebridge.bridge.config import CalibrateConfig
from statebridge.bridge.documents import TokenWindow
from statebridge.bridge.fit import silent
from statebridge.bridge.pair import ModelPair
from statebridge.bridge.paired import SPLITS, Split
from statebridge.calibrate import Calibrator, layer_norms
from statebridge.errors import ConfigError


def fit_calibrator(
    pair: ModelPair,
    bridge: Bridge,
    windows: Mapping[Split, Sequence[TokenWindow]],
    config: CalibrateConfig | None = None,
    *,
    work_dir: str | Path | None = None,
    progress: Progress = silent,
) -> Bridge:
    """Train residuals on top of the plan of a bridge.

    Parameters
    ----------
    pair
        Source, receiver and tokenizer.
    bridge
        A bridge of this pair under the plan to build on; a calibrator it has is replaced.
    windows
        "fit" and "validation" documents of at least `config.prefix + config.positions` tokens, no document in
        both.
    config
        Settings; the published protocol when left out.
    work_dir
        Folder for states, native logits and the unfinished training; an interrupted run goes on there. A
        temporary folder when left out.
    progress
        Called with (stage, done, total): "read documents" in micro-batches, "calibrate" in steps, most of which
        an early stop may leave out, and "ablate" in variants.

    Returns
    -------
    Bridge
        The bridge with the calibrator of the lowest validation KL (the identity if nothing was better); its
        `config.calibration` is the report. Under `accelerate launch`, every process returns the same.

    Raises
    ------
    StateMismatch
        When the bridge is of another pair.
    DocumentError
        When documents are missing, too short, or in both splits.
    FitError
        When a state is not finite, the disk or the device is too small, the training diverges, or no gradient
        passes.
    ConfigError
        When `work_dir` holds another run, several processes have none, or models take turns and states are not
        kept on the disk.
    """
    from accelerate import PartialState

    config = config or CalibrateConfig()
    # accelerate takes CPU processes for so many single ones unless it is told
    process = PartialState(cpu=pair.receiver.device.type == "cpu")
    remedy = "Use a bridge fitted for this pair."
    bridge.config.source.require(pair.source_identity, "this bridge is of another source", remedy)
    bridge.config.receiver.require(pair.receiver_identity, "this bridge leads to another receiver", remedy)
    if pair.takes_turns and config.needs_both_models:
        raise ConfigError(
            f'states "{config.states}" needs both models on their devices; keep the states on "disk", or load them '
            "together."
        )
    if work_dir is None and process.num_processes > 1:
        raise ConfigError("Several processes need a work_dir that all of them see.")
    rank, processes = process.process_index, process.num_processes
    with tempfile.TemporaryDirectory() as scratch, _frozen(pair.source, pair.receiver):
        folder = Path(work_dir or scratch) / "calibration"
        documents = CalibrationDocuments(pair, bridge, windows, config, folder / "documents")
        claim_folder(folder, _fingerprint(pair, bridge, documents, config), rank)
        with sole_run(folder, rank):
            documents.prepare(progress, rank, processes)
            process.wait_for_everyone()
            path = choose_backward(
                pair.receiver, documents.windows["fit"][0].ids[None, : 2 * config.positions]
            )
            progress(f"training passes use the {path.name} functions", 1, 1)
            file = folder / "training.safetensors"
            trainer = Trainer(pair.receiver, documents, config, process, file, path)
            calibrator, points = trainer.run(progress)
            report = _report(trainer, calibrator, points, progress)
            process.wait_for_everyone()  # nobody reads the folder any more
    return bridge.with_calibrator(calibrator.to("cpu"), report)


def _report(
    trainer: Trainer,
    calibrator: Calibrator,
    points: list[dict[str, Any]],
    progress: Progress,
) -> dict[str, Any]:
    """How the calibrator was trained, and what it does on the validation documents, as JSON gives it back."""
    windows = trainer.documents.windows
    report = {
        "settings": dataclasses.asdict(trainer.config),
        "documents": {split: [window.id for window in windows[split]] for split in SPLITS},
        "backward": dataclasses.asdict(trainer.backward),
        "grid": points,
        "chosen": _chosen(points),
        "trainable_values": calibrator.trainable_values,
        "values": calibrator.values,
        **_ablation(trainer, calibrator, progress),
        "residual_norms": _norms(trainer, calibrator),
    }
    return json.loads(json.dumps(report))  # type: ignore[no-any-return]


def _chosen(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    best = min(points, key=lambda point: point["validation_kl"])  # the first of equals, as in the training
    return {key: value for key, value in best.items() if key != "curve"}


def _ablation(trainer: Trainer, calibrator: Calibrator, progress: Progress) -> dict[str, Any]:
    """Validation KL without the calibrator, with it, and with each component of it switched off."""
    variants = {"plan": Calibrator({}), "calibrated": calibrator}
    if len(calibrator.components) > 1:
        variants |= {f"without {c}": calibrator.without(c) for c in calibrator.components}
    found = {}
    for number, (name, variant) in enumerate(variants.items()):
        progress("ablate", number, len(variants))
        found[name] = trainer.validation_kl(variant)  # [N, P]
    progress("ablate", len(variants), len(variants))
    return {
        "validation_kl": {name: kl.mean(1).tolist() for name, kl in found.items()},
        "validation_kl_by_position": {name: kl.mean(0).tolist() for name, kl in found.items()},
    }


def _norms(trainer: Trainer, calibrator: Calibrator) -> dict[str, dict[str, float]]:
    """Mean relative residual norm over validation documents, per layer: of the layer and of each part."""
    documents, norms = trainer.documents, []
    for numbers in documents.chunks("validation"):
        batch = documents.batch("validation", numbers)
        with torch.no_grad():
            movement = calibrator.movement(batch.base.layers)
        found = {(layer, "layer"): norm for layer, norm in layer_norms(movement).items()}
        found |= {unit: (moved / size).sqrt() for unit, (moved, size) in movement.items()}
        norms.append({unit: norm.cpu() for unit, norm in found.items()})
    result: dict[str, dict[str, float]] = {}
    for layer, name in norms[0]:
        mean = float(torch.cat([chunk[layer, name] for chunk in norms]).mean())
        result.setdefault(str(layer), {})[name] = mean
    return result


def _fingerprint(
    pair: ModelPair, bridge: Bridge, documents: CalibrationDocuments, config: CalibrateConfig
) -> dict[str, Any]:
    """Everything that decides what lies in the folder; processes and where states are kept do not."""
    tokens, maps = hashlib.sha256(), hashlib.sha256()
    for split in SPLITS:
        for window in documents.windows[split]:
            tokens.update(f"{split} {window.id} ".encode() + window.ids.numpy().tobytes())
    for (layer, name), translator in sorted(bridge.translators.items()):
        for part, tensor in translator.tensors().items():
            maps.update(f"{layer} {name} {part} ".encode() + tensor.cpu().contiguous().numpy().tobytes())
    settings = {f"setting {k}": value for k, value in dataclasses.asdict(config).items() if k != "states"}
    return json.loads(  # type: ignore[no-any-return]
        json.dumps(
            {
                "source": model_fingerprint(pair.source, pair.source_identity),
                "receiver": model_fingerprint(pair.receiver, pair.receiver_identity),
                "tokenizer": documents.tokenizer,
                "plan": str(bridge.plan),
                "translators": maps.hexdigest(),
                "documents": tokens.hexdigest(),
                **settings,
            }
        )
    )


@contextlib.contextmanager
def _frozen(*models: Any) -> Iterator[None]:
    """Keep weights out of the autograd graph and models in eval mode, for a while."""
    flags = [(p, p.requires_grad) for model in models for p in model.parameters()]
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval().requires_grad_(False)
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for module, mode in modes:
            module.training = mode
