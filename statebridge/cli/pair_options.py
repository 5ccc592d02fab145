"""Options that every verb with a pair of models has, and the loading of that pair.

Knows the command line and where a process may run; what a pair is, is known in the bridge room. Heavy
libraries are imported in the function, so that `--help` stays quick.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from statebridge.bridge import ModelPair

SourceOption = Annotated[str, typer.Option(help="Folder or hub name of the model that reads.")]
ReceiverOption = Annotated[str, typer.Option(help="Folder or hub name of the model that continues.")]


def load_pair(source: str, receiver: str, device: str, dtype: str) -> ModelPair:
    """Load both models onto one device, or spread them with `auto`; `cuda` is the GPU of this process."""
    from statebridge.bridge import ModelPair

    place = prepare_device(device)
    return ModelPair.from_pretrained(source, receiver, dtype=dtype, device_map=place)


def prepare_device(device: str) -> str:
    """Name of a device that is there, `cuda` spelt out for this process; loading will be quiet from now on."""
    import torch
    from transformers.utils import logging

    from statebridge.errors import ConfigError

    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    if device != "auto":
        try:
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(
                f"The device {device} is not there ({reason}); choose another --device."
            ) from error
    logging.set_verbosity_error()  # which kernels are absent is what `statebridge doctor` tells
    logging.disable_progress_bar()
    return device


def is_main_process() -> bool:
    """Whether this process is the one that writes and speaks."""
    return os.environ.get("RANK", "0") == "0"
