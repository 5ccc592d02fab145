"""Whose numbers these are: identities and digests of models, bridge, tokenizer and documents, and the ground.

A run's folder is claimed by its settings and its provenance; whoever comes with others is refused, so that two
runs never mix.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

import torch
import yaml

from statebridge.bridge import Bridge, ModelPair, tokenizer_digest
from statebridge.capture.model import backend_of
from statebridge.errors import ConfigError
from statebridge.evaluate.config import EvaluateConfig
from statebridge.state.atomic import atomic_file


def environment(processes: int) -> dict[str, Any]:
    """The ground that a run stands on; a resumed run may stand on another."""
    return {
        "statebridge": importlib.metadata.version("statebridge"),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
        "processes": processes,
    }


def provenance_of(pair: ModelPair, bridge: Bridge, documents: list[str]) -> dict[str, Any]:
    """What makes two runs comparable, as plain data."""
    return {
        "source": {"name": pair.source_identity.name, "weights": pair.source_identity.weights},
        "receiver": {"name": pair.receiver_identity.name, "weights": pair.receiver_identity.weights},
        "tokenizer": tokenizer_digest(pair.tokenizer),
        "plan": bridge.config.plan,
        "bridge": _bridge_digest(bridge),
        "backend": {
            "source": dict(backend_of(pair.source)),
            "receiver": dict(backend_of(pair.receiver)),
        },
        "documents": documents,
    }


def training_of(bridge: Bridge) -> dict[str, Any]:
    """What a report shows of how the bridge was made: tensor errors of its fit, training of its calibrator."""
    shown = ("grid", "chosen", "validation_kl", "trainable_values")
    calibration = {key: bridge.config.calibration[key] for key in shown if key in bridge.config.calibration}
    return {"errors": bridge.config.fit.get("errors", {}), "calibration": calibration}


def _bridge_digest(bridge: Bridge) -> str:
    """sha256 over every map of a bridge, calibrator included."""
    digest = hashlib.sha256()
    maps = {f"{layer}.{name}": found.tensors() for (layer, name), found in bridge.translators.items()}
    if bridge.calibrator is not None:
        maps["calibrator"] = bridge.calibrator.tensors()
    for name, tensors in sorted(maps.items()):
        for part, tensor in sorted(tensors.items()):
            digest.update(f"{name}.{part}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def claim(folder: Path, config: EvaluateConfig, provenance: dict[str, Any], main: bool) -> None:
    """Write a run's `config.yaml`, or refuse a folder that holds another run's.

    Raises
    ------
    ConfigError
        Names the settings that differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content = json.loads(json.dumps({"evaluate": dataclasses.asdict(config), "provenance": provenance}))
    path = folder / "config.yaml"
    if path.exists():
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        for part in ("evaluate", "provenance"):
            old = found.get(part, {}) if isinstance(found, dict) else {}
            changed = sorted(
                k for k in content[part].keys() | old.keys() if content[part].get(k) != old.get(k)
            )
            if changed:
                raise ConfigError(
                    f"{folder} holds a run with another {', '.join(changed)}; choose another folder or delete it."
                )
    elif main:
        with atomic_file(path) as temporary:
            temporary.write_text(
                yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8"
            )
