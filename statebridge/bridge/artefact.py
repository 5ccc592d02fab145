"""A bridge on disk: a folder of `config.json`, `model.safetensors` and `README.md`.

The config holds classes, plan, format version, the identities of both models and one sha256 over itself and
the weights. Saving puts the config in place last, so a save that was killed half-way leaves the older bridge,
or a folder whose digest is wrong, which loading refuses; old and new are never mixed. Nothing in a folder is
executed, and every name, shape and value is checked before it is used. Knows values and files, no models.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load_file, save_file

from statebridge.calibrate import Calibrator
from statebridge.errors import ConfigError, FitError, StateFileError
from statebridge.select import Plan
from statebridge.state import ModelIdentity
from statebridge.state.file import atomic_file
from statebridge.translate import BlockAffine, HeadAffine, HeadBilinear, Translator

FORMAT = "statebridge.bridge"
FORMAT_VERSION = 1
#: Which map translates which field of a layer.
MAPS: dict[str, type[Translator]] = {
    "key": HeadAffine,
    "value": HeadAffine,
    "recurrent_state": HeadBilinear,
    "conv_state": BlockAffine,
}
Translators = Mapping[tuple[int, str], Translator]
_CALIBRATOR = "calibrator."  # before the names of the calibrator's own tensors
_TENSOR_NAME = re.compile(r"layers\.([0-9]{1,6})\.([a-z_]+)\.(.+)")


@dataclass(frozen=True)
class BridgeConfig:
    """Everything of a bridge but its tensors.

    Attributes
    ----------
    source, receiver
        Identities of the two models.
    plan
        Per component K, R, C: "T" translate or "D" copy, in the written form of `Plan`.
    tokenizer
        Digest of the tokenizer that both models share, "" when unknown.
    fit
        How the translators were fitted: settings, documents, errors on validation documents.
    calibration
        How the calibrator was trained: settings, documents, curves, ablation; empty without one.
    """

    source: ModelIdentity
    receiver: ModelIdentity
    plan: str = "DDD"
    tokenizer: str = ""
    fit: Mapping[str, Any] = field(default_factory=dict)
    calibration: Mapping[str, Any] = field(default_factory=dict)


def write_folder(
    folder: Path, config: BridgeConfig, translators: Translators, calibrator: Calibrator | None, card: str
) -> None:
    """Write a bridge; a card that is there stays if it belongs to this very bridge.

    Raises
    ------
    StateFileError
        When the folder cannot be written.
    """
    tensors = {
        f"layers.{index}.{name}.{part}": tensor.detach().cpu().contiguous()
        for (index, name), translator in translators.items()
        for part, tensor in translator.tensors().items()
    }
    if calibrator is not None:
        tensors |= {
            _CALIBRATOR + name: tensor.cpu().contiguous() for name, tensor in calibrator.tensors().items()
        }
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "maps": {name: kind.__name__ for name, kind in MAPS.items()},
        **dataclasses.asdict(config),
    }
    paths = [folder / name for name in ("config.json", "README.md", "model.safetensors")]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StateFileError(f"{folder} cannot be made ({error.strerror}); choose another folder.") from error
    # left in reverse order: the weights take their place first, the config that vouches for them last
    with (
        atomic_file(paths[0]) as new_config,
        atomic_file(paths[1]) as new_card,
        atomic_file(paths[2]) as weights,
    ):
        try:
            save_file(tensors, weights, metadata={"format": FORMAT})
        except safetensors.SafetensorError as error:
            raise OSError(str(error)) from error  # safetensors wraps what the disk said
        content["digest"] = _digest(content, weights)
        text = json.dumps(content, indent=2) + "\n"
        same = paths[1].is_file() and paths[0].is_file() and paths[0].read_bytes() == text.encode()
        new_config.write_text(text, encoding="utf-8")
        new_card.write_bytes(paths[1].read_bytes() if same else card.encode())


def read_folder(folder: Path) -> tuple[BridgeConfig, dict[tuple[int, str], Translator], Calibrator | None]:
    """Read a bridge and check its digest; unknown keys of a later minor version are ignored with a warning.

    Raises
    ------
    StateFileError
        When the folder holds no bridge, a newer one, or one that was damaged, edited or half saved.
    """
    path, weights = folder / "config.json", folder / "model.safetensors"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind, version = content["format"], int(content["format_version"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise StateFileError(
            f"{folder} is not a bridge folder: its config.json is missing or not that of a bridge; "
            "give the folder that `statebridge fit --out` wrote."
        ) from error
    if kind != FORMAT or version > FORMAT_VERSION:
        raise StateFileError(
            f"{path} holds {kind!r} version {version}, this library reads {FORMAT!r} up to {FORMAT_VERSION}; "
            "upgrade statebridge."
        )
    if not weights.is_file() or content.get("digest") != _digest(content, weights):
        raise StateFileError(
            f"{folder} does not match its digest: it was edited, damaged or saved half; fetch or save it again."
        )
    try:
        if content["maps"] != {name: kind.__name__ for name, kind in MAPS.items()}:
            raise ValueError(f"maps {content['maps']}")
        config = BridgeConfig(
            source=ModelIdentity.from_dict(content["source"]),
            receiver=ModelIdentity.from_dict(content["receiver"]),
            plan=str(Plan.parse(content["plan"])),
            tokenizer=str(content["tokenizer"]),
            fit=dict(content["fit"]),
            calibration=dict(content.get("calibration", {})),
        )
        tensors = load_file(weights)
        trained = {
            # clones, because safetensors gives views of the mapped file
            name.removeprefix(_CALIBRATOR): tensors.pop(name).clone()
            for name in list(tensors)
            if name.startswith(_CALIBRATOR)
        }
        calibrator = Calibrator.from_tensors(trained) if trained else None
        translators = _translators(tensors, len(config.source.layers))
    except (*_MALFORMED, ConfigError, FitError, StateFileError) as error:
        raise malformed(folder, error) from error
    known = {f.name for f in dataclasses.fields(BridgeConfig)} | {
        "format",
        "format_version",
        "maps",
        "digest",
    }
    if unknown := sorted(content.keys() - known):
        warnings.warn(
            f"{path} was saved by a later version of statebridge; ignoring {', '.join(unknown)}.",
            stacklevel=3,
        )
    return config, translators, calibrator


#: What reading JSON and tensors of unexpected shape can raise.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, RuntimeError, safetensors.SafetensorError)


def malformed(folder: Path, error: Exception) -> StateFileError:
    """The error for a folder whose digest is right and whose content makes no bridge."""
    return StateFileError(f"{folder} holds a malformed bridge ({error}); fetch or fit it again.")


def fetch(name: str | Path, **options: Any) -> Path:
    """The folder of a bridge: `name` itself, or its snapshot from the hub (`options` of snapshot_download).

    Raises
    ------
    StateFileError
        When there is neither such a folder nor such a repository.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(str(name), allow_patterns=["config.json", "model.safetensors"], **options)
        )
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise StateFileError(f"{name} is no folder and cannot be fetched from the hub ({reason}).") from error


def _translators(tensors: Mapping[str, torch.Tensor], layers: int) -> dict[tuple[int, str], Translator]:
    parts: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None or match[2] not in MAPS or int(match[1]) >= layers:
            raise ValueError(f"unexpected tensor {name!r}")
        # a clone, because safetensors gives views of the mapped file
        parts.setdefault((int(match[1]), match[2]), {})[match[3]] = tensor.clone()
    return {key: MAPS[key[1]].from_tensors(found) for key, found in parts.items()}


def _digest(content: Mapping[str, Any], weights: Path) -> str:
    """sha256 over the config without its digest, as JSON gives it back, and over the weights file."""
    rest = json.dumps({key: value for key, value in content.items() if key != "digest"}, sort_keys=True)
    with weights.open("rb") as file:
        return hashlib.sha256((rest + hashlib.file_digest(file, "sha256").hexdigest()).encode()).hexdigest()
