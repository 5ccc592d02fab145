"""A world model on disk: a folder with config.json and model.safetensors, weights as float16.

The folder says how the network is shaped and what it was trained on; loading gives float32 on a CPU unless
another dtype is asked for. Knows files and the model, no sessions.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from statebridge.errors import StateFileError
from statebridge.state.atomic import atomic_file
from statebridge.worlds.geometry import Camera, Grid
from statebridge.worlds.model import WorldConfig, WorldModel
from statebridge.worlds.rotary import Rotary

FORMAT = 1


def save_world(folder: str | os.PathLike[str], model: WorldModel, training: Mapping[str, Any]) -> None:
    """Write a model and what is known about its training.

    Raises
    ------
    StateFileError
        When the folder cannot be written.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().half().cpu().contiguous() for name, value in model.state_dict().items()}
    with atomic_file(target / "model.safetensors") as temporary:
        save_file(tensors, temporary)
    shape = dataclasses.asdict(model.config)
    content = {"format": FORMAT, "model": shape, "training": dict(training)}
    with atomic_file(target / "config.json") as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_world(
    folder: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> WorldModel:
    """Read a model for inference.

    Raises
    ------
    StateFileError
        When the folder holds no world model of this format, or a damaged one.
    """
    path = Path(folder)
    try:
        content = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise StateFileError(
                f"{path} has format {content['format']}, this version reads {FORMAT}; update."
            )
        model = WorldModel(config_of(content["model"]))
        tensors = load_file(path / "model.safetensors")
        model.load_state_dict(tensors)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise StateFileError(f"{path} holds no readable world model ({error}); give its folder.") from error
    broken = [name for name, value in tensors.items() if not value.isfinite().all()]
    if broken:
        raise StateFileError(
            f"{path} holds weights that are not finite, first in {min(broken)}; train or copy the model again."
        )
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def config_of(data: Mapping[str, Any]) -> WorldConfig:
    """The shape of a model from the form that JSON keeps."""
    values = dict(data)
    rotary = dict(values.pop("rotary"))
    rotary["pairs"] = tuple(rotary["pairs"])
    return WorldConfig(
        camera=Camera(**values.pop("camera")),
        grid=Grid(**values.pop("grid")),
        rotary=Rotary(**rotary),
        **values,
    )
