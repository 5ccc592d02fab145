"""Options that every verb with a pair of models has, and the loading of that pair.

Knows the command line and where a process may run; what a pair is, is known in the bridge room. Heavy
libraries are imported in the function, so that `--help` stays quick.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from statebridge.bridge import ModelPair

SourceOption = Annotated[str, typer.Option(help="Folder or hub name of the model that reads.")]
ReceiverOption = Annotated[str, typer.Option(help="Folder or hub name of the model that continues.")]
ConfigOption = Annotated[Path | None, typer.Option(help="YAML file of settings; see configs/.")]
DocumentsOption = Annotated[
    str | None,
    typer.Option(help="Text, .jsonl or .parquet file, folder of such, or hub dataset; else the config's."),
]


class Loading(StrEnum):
    """Where the models of a pair lie while they are used."""

    together = "together"
    sequential = "sequential"


LoadOption = Annotated[
    Loading,
    typer.Option(
        "--load",
        help="sequential keeps both models on the host and one at a time on the device, where memory is short.",
    ),
]


def load_pair(
    source: str,
    receiver: str,
    device: str,
    dtype: str,
    *,
    receiver_device: str | None = None,
    load: Loading = Loading.together,
) -> ModelPair:
    """Load both models.

    Parameters
    ----------
    source, receiver
        Folder or hub name.
    device
        Of both, or of the source; `auto` spreads them, `cuda` is the GPU of this process.
    dtype
        Of the models.
    receiver_device
        Of the receiver, where it is another.
    load
        Together, or one at a time on `device`.

    Raises
    ------
    ConfigError
        When models that take turns have more than one device, or a device is not there.
    """
    from statebridge.bridge import ModelPair
    from statebridge.bridge.turns import TurnPair
    from statebridge.errors import ConfigError

    place = prepare_device(device)
    if load is Loading.sequential:
        if receiver_device is not None or device == "auto":
            raise ConfigError("--load sequential is for one device; name it with --device alone.")
        pair = ModelPair.from_pretrained(source, receiver, dtype=dtype, device_map="cpu")
        return TurnPair.of(pair, place)
    places = (place, place if receiver_device is None else prepare_device(receiver_device))
    return ModelPair.from_pretrained(source, receiver, dtype=dtype, device_map=places)


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
