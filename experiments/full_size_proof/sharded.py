"""The full-size proof on two GPUs: documents shared by two processes, models on different devices, one model on two.

    python -m torch.distributed.run --nproc_per_node=2 -m experiments.full_size_proof.sharded moments --out runs/proof
    python -m experiments.full_size_proof.sharded devices --out runs/proof

    moments    two processes, a pair of models each, collect half of the documents; what they merge must be what one
               process collects, within float64 rounding. The kernels of the delta rule are tuned by one process and
               read from its cache by the other: tuned apart, two processes may choose differently, and then their
               states differ within the rounding of bfloat16, whoever adds them up
    devices    a hand-over from a source on one GPU to a receiver on the other, and to a receiver spread over both,
               gives the logits of the hand-over on one GPU

With --tiny on a CPU: the same code, where both devices are the CPU. Each part writes OUT/PART.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from experiments.full_size_proof.maps import random_maps
from experiments.full_size_proof.models import FULL, TINY, random_model, random_pair
from statebridge.bridge import Bridge, FitConfig, ModelPair
from statebridge.bridge.artefact import BridgeConfig
from statebridge.bridge.collect import collect, state_counts
from statebridge.bridge.documents import TokenWindow
from statebridge.bridge.geometry import Geometry
from statebridge.bridge.paired import PairedStates
from statebridge.capture import continue_from, identity_of, prefill
from statebridge.capture.load import load_tokenizer

ROUNDING = 1e-12  # float64 sums in another order, relative to the largest entry


def moments(tiny: bool, tokenizer: str) -> dict[str, Any]:
    """Merged moments of all processes against those of one."""
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    process = PartialState(cpu=tiny)
    device = "cpu" if tiny else f"cuda:{process.local_process_index}"
    pair = random_pair(tiny, device, device, load_tokenizer(tokenizer))
    lengths = (8, 16) if tiny else (512, 1024)
    config = FitConfig(fit_documents=8, validation_documents=4, checkpoints=lengths, batch_size=2)
    windows: Any = {
        "validation": _windows(pair, 4, max(lengths), 0),
        "fit": _windows(pair, 8, max(lengths), 100),
    }
    counts = state_counts(windows, config)
    for rank in range(process.num_processes):
        if rank == process.process_index:
            _tune(pair, lengths, config.batch_size)
        process.wait_for_everyone()
    with TemporaryDirectory() as scratch:
        folder = broadcast_object_list([scratch])[0]
        times = []
        for name, rank, processes in (
            ("shared", process.process_index, process.num_processes),
            ("alone", 0, 1),
        ):
            started = time.monotonic()
            if name == "shared" or process.is_main_process:
                collect(pair, windows, config, Path(folder) / name, lambda *_: None, rank, processes)
            process.wait_for_everyone()
            times.append(time.monotonic() - started)
        found = {}
        if process.is_main_process:
            geometry = Geometry.of(pair)
            shared, alone = (
                PairedStates.merged(Path(folder) / name, geometry, counts, n)
                for name, n in (("shared", process.num_processes), ("alone", 1))
            )
            worst, entries = _compare(shared, alone)
            differing = _differing_states(Path(folder), counts)
            found = {
                "processes": process.num_processes,
                "documents": sum(counts.values()) // len(lengths),
                "moment entries": entries,
                "largest relative difference": worst,
                "states whose R differs": differing,
                "seconds shared, alone": times,
                "failed": [] if worst <= ROUNDING and not differing else ["merged moments"],
            }
        process.wait_for_everyone()
    return found


def _tune(pair: ModelPair, lengths: tuple[int, ...], batch: int) -> None:
    for length in lengths:
        for model in (pair.source, pair.receiver):
            prefill(model, torch.randint(3, model.config.vocab_size, (batch, length), generator=_seeded(0)))


def _differing_states(folder: Path, counts: Any) -> int:
    """States of which some matrix in some layer of either model is not the same to the last bit."""
    found = set()
    for path in (folder / "shared/recurrent").iterdir():
        split = path.name.partition(".")[0]
        ours, theirs = (
            np.fromfile(folder / name / "recurrent" / path.name, np.uint8).reshape(counts[split], -1)
            for name in ("shared", "alone")
        )
        found |= {(split, int(row)) for row in np.flatnonzero((ours != theirs).any(1))}
    return len(found)


def _windows(pair: ModelPair, count: int, length: int, first: int) -> list[TokenWindow]:
    vocab = pair.source.config.vocab_size
    return [
        TokenWindow(f"random-{n}", torch.randint(3, vocab, (length,), generator=_seeded(n)))
        for n in range(first, first + count)
    ]


def _compare(one: PairedStates, other: PairedStates) -> tuple[float, int]:
    """Largest difference of two sets of moments, relative to the largest entry of each tensor, and their size."""
    worst, entries = 0.0, 0
    for kind in ("key", "value", "conv"):
        for split in ("validation", "fit"):
            ours, theirs = (getattr(states, kind)[split] for states in (one, other))
            assert ours.keys() == theirs.keys()
            for index in ours:
                expected = theirs[index].state_dict()
                for name, tensor in ours[index].state_dict().items():
                    scale = expected[name].abs().max().clamp(min=1e-300)
                    worst = max(worst, float((tensor - expected[name]).abs().max() / scale))
                    entries += tensor.numel()
    return worst, entries


def devices(tiny: bool, tokenizer: str) -> dict[str, Any]:
    """Hand-overs within one device, from one to the other, and to a receiver on both."""
    from accelerate import dispatch_model

    first, second = ("cpu", "cpu") if tiny else ("cuda:0", "cuda:1")
    names, length = (TINY, 40) if tiny else (FULL, 4096)
    pair = random_pair(tiny, first, first)
    identities = (pair.source_identity, pair.receiver_identity)
    bridge = Bridge(BridgeConfig(*identities, "TTT", ""), random_maps(pair))
    ids = torch.randint(3, pair.source.config.vocab_size, (1, length + 8), generator=_seeded(0))
    prefix, after = ids[:, :length], ids[:, length:]
    state = bridge(prefill(pair.source, prefix).state())
    expected = continue_from(pair.receiver, state, after).logits
    found: dict[str, Any] = {"largest logit": float(expected.abs().max())}
    own = prefill(pair.receiver, prefix).state()
    native = continue_from(pair.receiver, own, after).logits
    receiver = random_model(names[1], second, 1)
    assert identity_of(receiver).weights == identities[1].weights, "the same seed gave other weights"
    moved = continue_from(receiver, state, after)
    found["receiver on the other device"] = _difference(moved.logits, expected)
    half = receiver.config.num_hidden_layers // 2
    places = {"model.embed_tokens": first, "model.rotary_emb": first, "model.norm": second, "lm_head": second}
    layers = range(receiver.config.num_hidden_layers)
    places |= {f"model.layers.{i}": first if i < half else second for i in layers}
    spread = receiver if tiny else dispatch_model(receiver, places)
    found["receiver on two devices"] = _difference(continue_from(spread, state, after).logits, expected)
    kept = prefill(spread, prefix).state()
    where = {str(t.device) for layer in kept.layers for _, t in layer.tensors()}
    found["devices of a state of it"] = sorted(where)
    found["its own state, restored"] = _difference(continue_from(spread, kept, after).logits, native)
    exact = ("receiver on the other device", "receiver on two devices", "its own state, restored")
    found["failed"] = [name for name in exact if found[name] != 0]
    found["failed"] += [] if tiny or len(where) == 2 else ["devices of a state of it"]
    return found


def _difference(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.to(expected.device).float() - expected.float()).abs().max())


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main() -> None:
    """Run one part."""
    parts = {"moments": moments, "devices": devices}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=list(parts))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--tokenizer", default="checkpoints/source", help="Any tokenizer; its digest is recorded."
    )
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if found := parts[options.part](options.tiny, options.tokenizer):
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{options.part}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
        print(json.dumps(found, indent=1), flush=True)
        sys.exit(1 if found["failed"] else 0)


if __name__ == "__main__":
    main()
