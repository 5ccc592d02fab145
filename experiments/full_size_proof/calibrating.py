"""What one document costs the training of a calibrator, with its state in each place that `states` names.

    read        `documents.batch`: a base state and native logits, from where they are kept to the device
    step        one step of Adam: read, forward and backward pass through the receiver
    evaluate    one reading of the validation KL: read and forward pass

All are per document, of prefixes of the published length, one document a pass. The weights are random, so that the
calibrator learns nothing; times do not depend on that. Files are read a second time, from the page cache, as nearly
all readings of a training are.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import PartialState

from experiments.full_size_proof.timing import Log, Stopwatch, seeded
from statebridge.bridge import Bridge, CalibrateConfig, ModelPair, TokenWindow
from statebridge.bridge.backward import BackwardPath, choose_backward
from statebridge.bridge.calibrate_documents import CalibrationDocuments
from statebridge.bridge.calibrate_train import Trainer
from statebridge.calibrate import Calibrator

DOCUMENTS = {"fit": 4, "validation": 2}
STATES = ("disk", "device", "recompute")
_ROUNDS = 3


def calibrate(pair: ModelPair, tiny: bool, log: Log) -> dict[str, Any]:
    """Seconds of preparing, reading, steps and evaluations for each place, and bytes of what is kept."""
    config = CalibrateConfig(
        prefix=64 if tiny else 4096, positions=9, ranks=(4,), batch_size=DOCUMENTS["fit"], micro_batch=1
    )
    windows = _windows(pair, config.prefix + config.positions)
    path = choose_backward(pair.receiver, windows["fit"][0].ids[None, : 2 * config.positions])
    log(f"training passes use the {path.name} functions: {path.reason}")
    found: dict[str, Any] = {"documents": DOCUMENTS, "backward": dataclasses.asdict(path), "modes": {}}
    for states in STATES:
        with TemporaryDirectory() as folder:
            settings = dataclasses.replace(config, states=states)
            cost = _measured(pair, settings, windows, Path(folder), path)
        found["modes"][states] = cost
        log(f"{states}: " + ", ".join(f"{name} {value:,.4g}" for name, value in cost.items()))
    return found | {"failed": []}


def _measured(
    pair: ModelPair, config: CalibrateConfig, windows: Any, folder: Path, path: BackwardPath
) -> dict[str, float]:
    """Seconds per document of each part, and bytes of a state and of a document's logits."""
    bridge = Bridge.direct(pair.source_identity, pair.receiver_identity)
    documents = CalibrationDocuments(pair, bridge, windows, config, folder / "documents")
    process = PartialState(cpu=documents.device.type == "cpu")
    trainer = Trainer(pair.receiver, documents, config, process, folder / "training.safetensors", path)
    calibrator = Calibrator.identity(pair.receiver_identity.layers, rank=4).to(documents.device)
    adam = torch.optim.Adam(calibrator.parameters(), lr=config.learning_rate)
    spent = Stopwatch(documents.device)
    _warm_up(pair, bridge, windows, config, folder / "warm")
    with spent("prepare"):
        documents.prepare(lambda *_: None)
    batch = _read_all(documents)
    trainer._step(calibrator, adam, config.penalties[0], 0)
    trainer.validation_kl(calibrator)
    for number in range(1, _ROUNDS + 1):
        with spent("read"):
            _read_all(documents)
        with spent("step"):
            trainer._step(calibrator, adam, config.penalties[0], number)
        with spent("evaluate"):
            trainer.validation_kl(calibrator)
    count = {
        "prepare": sum(DOCUMENTS.values()),
        "read": _ROUNDS * DOCUMENTS["fit"],
        "step": _ROUNDS * DOCUMENTS["fit"],
        "evaluate": _ROUNDS * DOCUMENTS["validation"],
    }
    return {name: spent.seconds[name] / count[name] for name in count} | {
        "state_bytes": sum(batch.base.nbytes().values()),
        "logit_bytes": batch.native.nbytes,
    }


def _warm_up(pair: ModelPair, bridge: Bridge, windows: Any, config: CalibrateConfig, folder: Path) -> None:
    """Read one document of each split somewhere else, so that no kernel is tuned inside a measurement."""
    first = {split: documents[:1] for split, documents in windows.items()}
    CalibrationDocuments(pair, bridge, first, config, folder).prepare(lambda *_: None)


def _read_all(documents: CalibrationDocuments) -> Any:
    for number in range(DOCUMENTS["fit"]):
        batch = documents.batch("fit", [number])
    return batch


def _windows(pair: ModelPair, length: int) -> dict[str, list[TokenWindow]]:
    vocab, generator = pair.source.config.vocab_size, seeded(2)
    return {
        split: [
            TokenWindow(f"{split} {n}", torch.randint(3, vocab, (length,), generator=generator))
            for n in range(count)
        ]
        for split, count in DOCUMENTS.items()
    }
