"""The parts of the full-size proof that run in one process on one device; run.sh runs all parts.

    python -m experiments.full_size_proof.prove facts restore ridge calibrate --out runs/proof
    python -m experiments.full_size_proof.prove facts restore ridge calibrate --out runs/tiny --tiny     # on a CPU

    facts      parameters, bytes of a state of 4,096 tokens, trainable values of the calibrator: as published
    restore    the restore control, 16 contexts × four lengths, both models: maximum logit difference 0
    ridge      time of moments and of solving the maps, beside the forward passes of both models
    calibrate  time of a document in the training of a calibrator, with its state on the disk, the device, or nowhere

Each part writes OUT/PART.json; the exit code is 1 where one failed. The suite is the command
`statebridge reproduce`; several devices are sharded.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from experiments.full_size_proof.calibrating import calibrate
from experiments.full_size_proof.models import random_pair
from experiments.full_size_proof.timing import Log, Stopwatch, seeded
from statebridge.bridge import FitConfig, ModelPair
from statebridge.bridge.geometry import Geometry
from statebridge.bridge.paired import PairedStates
from statebridge.calibrate import Calibrator
from statebridge.capture import prefill
from statebridge.capture.load import load_tokenizer
from statebridge.evaluate.restore_control import NEXT_TOKENS, restore_control
from statebridge.translate import BilinearRidge, BlockRidge, KeyValueRidge

EXPECTED = {
    "source parameters": 4_205_751_296,
    "receiver parameters": 8_953_803_264,
    "bytes of a state of 4,096 tokens": 186_122_240,
    "trainable values of the calibrator": 434_176,
}


def facts(pair: ModelPair, tiny: bool, log: Log) -> dict[str, Any]:
    """What must be equal to the published figures."""
    found: dict[str, Any] = {
        f"{name} parameters": sum(p.numel() for p in getattr(pair, name).parameters())
        for name in ("source", "receiver")
    }
    ids = torch.randint(3, pair.source.config.vocab_size, (1, 4096), generator=seeded(0))
    states = [prefill(model, ids).state() for model in (pair.source, pair.receiver)]
    sizes = [state.nbytes() for state in states]
    assert sizes[0] == sizes[1], sizes
    found["bytes of a state of 4,096 tokens"] = sum(sizes[0].values())
    calibrator = Calibrator.identity(pair.receiver_identity.layers, rank=4)
    found["trainable values of the calibrator"] = calibrator.trainable_values
    for name, value in found.items():
        log(f"{name}: {value:,}")
    failed = [] if tiny else [name for name, value in EXPECTED.items() if found[name] != value]
    return found | {"by component": sizes[0], "failed": failed}


def restore(pair: ModelPair, tiny: bool, log: Log) -> dict[str, Any]:
    """The restore control on both models."""
    lengths = (16, 32, 48, 64) if tiny else (1024, 2048, 3072, 4096)
    found: dict[str, Any] = {"failed": []}
    for name in ("source", "receiver"):
        model = getattr(pair, name)
        shape = (16, max(lengths) + NEXT_TOKENS)
        contexts = torch.randint(3, model.config.vocab_size, shape, generator=seeded(1))
        started = time.monotonic()
        control = restore_control(model, contexts, lengths)
        for row in control.lengths:
            log(f"{name}, {row.length} tokens: top-1 {row.top1:.2%}, max difference {row.max_difference:g}")
        for check in control.checks:
            log(f"{name}, {check.name}: {'pass' if check.passed else 'FAIL'}, {check.detail}")
        found["failed"] += [f"{name}: {check.name}" for check in control.checks if not check.passed]
        found[name] = dataclasses.asdict(control) | {"seconds": time.monotonic() - started}
    return found


def ridge(pair: ModelPair, tiny: bool, log: Log) -> dict[str, Any]:
    """Forward passes, moments, R to disk, and the fits, each timed by itself, on a reduced number of documents."""
    config = FitConfig()
    lengths = (8, 16) if tiny else config.checkpoints
    batch, documents = (2, {"validation": 4, "fit": 8}) if tiny else (8, {"validation": 8, "fit": 24})
    device = pair.source.device
    spent = Stopwatch(device)
    with TemporaryDirectory() as folder:
        counts: Any = {split: n * len(lengths) for split, n in documents.items()}
        states = PairedStates(Path(folder), Geometry.of(pair), counts, device)
        states.reserve()
        _collect(pair, states, documents, lengths, batch, spent, log)
        maps: dict[str, Any] = {
            "key": lambda i: KeyValueRidge(config.ridge_alphas).fit(*_both(states.key, i)),
            "value": lambda i: KeyValueRidge(config.ridge_alphas).fit(*_both(states.value, i)),
            "conv_state": lambda i: BlockRidge(config.ridge_alphas).fit(*_both(states.conv, i)),
            "recurrent_state": lambda i: BilinearRidge(
                config.bilinear_alphas, config.bilinear_iterations
            ).fit(states.passes("fit", i), states.passes("validation", i)),
        }
        geometry = states.geometry
        layers = {"key": geometry.key_value, "value": geometry.key_value, "conv_state": geometry.conv}
        for name, fit in maps.items():
            for index in layers.get(name, geometry.recurrent):
                with spent(f"fit {name}"):
                    fit(index)
            log(f"fit {name}: {spent.seconds[f'fit {name}']:.2f} s")
    read = sum(documents.values())
    ends = [sum(p.numel() for p in model.parameters()) for model in (pair.source, pair.receiver)]
    return {
        "documents": read,
        "tokens_per_model": read * sum(lengths),
        "seconds": spent.seconds,
        "parameters": ends,
        "published_documents": config.fit_documents + config.validation_documents,
        "failed": [],
    }


def _collect(
    pair: ModelPair,
    states: PairedStates,
    documents: dict[str, int],
    lengths: tuple[int, ...],
    batch: int,
    spent: Stopwatch,
    log: Log,
) -> None:
    number = 0
    for split, count in [("warm up", batch), *documents.items()]:
        for start in range(0, count, batch):
            number += 1
            shape = (batch, max(lengths))
            ids = torch.randint(3, pair.source.config.vocab_size, shape, generator=seeded(number))
            for place, length in enumerate(lengths):
                with spent("warm up" if split == "warm up" else "forward"), torch.inference_mode():
                    live = [prefill(model, ids[:, :length]) for model in (pair.source, pair.receiver)]
                if split == "warm up":
                    continue
                with spent("capture"):
                    source, receiver = (one.state() for one in live)
                with spent("moments"):
                    states.add_moments(split, source, receiver, keys=length == max(lengths))  # type: ignore[arg-type]
                first, step = start * len(lengths) + place, len(lengths)
                with spent("R to disk"):
                    rows = slice(first, (start + batch) * step, step)
                    states.add_matrices(split, rows, source, receiver)  # type: ignore[arg-type]
        log(f"{split}: {count} documents, " + ", ".join(f"{k} {v:.2f} s" for k, v in spent.seconds.items()))


def _both(moments: Any, index: int) -> tuple[Any, Any]:
    return moments["fit"][index], moments["validation"][index]


def main() -> None:
    """Run the named parts on one pair."""
    parts = {"facts": facts, "restore": restore, "ridge": ridge, "calibrate": calibrate}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", choices=list(parts))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--tokenizer", default="checkpoints/source", help="Any tokenizer; its digest is recorded."
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    started = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {text}", flush=True)

    pair = random_pair(options.tiny, device, device, load_tokenizer(options.tokenizer))
    log(f"both models on {device}")
    options.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    for name in options.parts:
        began = time.monotonic()
        found = parts[name](pair, options.tiny, log)
        if device == "cuda":
            found["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        found["part_seconds"] = time.monotonic() - began
        (options.out / f"{name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        failed += found["failed"]
        log(f"{name}: {'FAILED ' + str(found['failed']) if found['failed'] else 'done'}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
