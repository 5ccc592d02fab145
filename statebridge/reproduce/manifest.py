"""The manifest of a run: what verify.py holds the run against.

Holds whose numbers these are: settings, identities and revisions of both models, identifiers and digests of every
document, versions, hardware, what each stage cost, and the sha256 of every file that a stage left.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from statebridge.bridge import ModelPair
from statebridge.evaluate.provenance import environment
from statebridge.reproduce.config import SuiteConfig
from statebridge.reproduce.documents import digest, stored
from statebridge.reproduce.figures import figures_of
from statebridge.reproduce.stages import read_json, stages_of, write_json

MANIFEST = "manifest.json"
_PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "datasets",
    "numpy",
    "flash-linear-attention",
)
# pictures and pages can be written again from the rest, by another matplotlib with other bytes
_RENDERED = ("report.html", "report.md", "report_files")
#: Folders that a stage works in and that are removed when it is recorded as finished.
SCRATCH = ("work", "parts")


def digests(folder: Path, stage: str) -> dict[str, str]:
    """Path below the run's folder -> sha256 of every file that a stage left, without pages and scratch."""
    found, left_out = {}, {*_RENDERED, *SCRATCH}
    for path in sorted((folder / stage).rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not left_out & set(parts):
            found["/".join(parts)] = file_digest(path)
    return found


def file_digest(path: Path) -> str:
    """sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path, config: SuiteConfig, pair: ModelPair | None) -> dict[str, Any]:
    """Write `manifest.json` from the run's folder; models as noted before where `pair` is None."""
    path = folder / MANIFEST
    if pair is None:
        before = read_json(path)
        models, ground = before["models"], before["environment"]
    else:
        models = {
            end: dataclasses.asdict(identity) | {"parameters": _parameters(pair, end)}
            for end, identity in (("source", pair.source_identity), ("receiver", pair.receiver_identity))
        }
        for end in models:
            del models[end]["rope"], models[end]["layers"]
        ground = environment(1) | _hardware()
    order = [stage.name for stage in stages_of(config, "all")]
    records = [read_json(found) for found in (folder / "stages").glob("*.json")]
    records.sort(key=lambda record: order.index(record["stage"]))
    manifest = {
        "config": dataclasses.asdict(config),
        "models": models,
        "environment": ground,
        "documents": document_digests(folder, config),
        "stages": {record["stage"]: record for record in records},
        "figures": figures_of(folder),
    }
    write_json(path, manifest)
    return read_json(path)


def document_digests(folder: Path, config: SuiteConfig) -> dict[str, dict[str, str]]:
    """Set -> document -> digest of its tokens, from the stored sets."""
    return {
        name: {window.id: digest(window.ids) for window in windows}
        for name, windows in stored(folder / "documents", tuple(config.sets())).items()
    }


def _parameters(pair: ModelPair, end: str) -> int:
    return sum(parameter.numel() for parameter in vars(pair)[end].parameters())


def _hardware() -> dict[str, Any]:
    versions: Mapping[str, str] = {
        name: importlib.metadata.version(name) for name in _PACKAGES if _installed(name)
    }
    devices = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return {"cores": os.cpu_count(), "accelerators": ", ".join(devices) or "none", "packages": versions}


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
