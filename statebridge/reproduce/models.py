"""The pair of a run: loaded by pinned revisions or built with random weights, held together or taking turns."""

from __future__ import annotations

from statebridge.bridge import ModelPair
from statebridge.bridge.turns import TurnPair
from statebridge.capture.load import load_tokenizer
from statebridge.capture.shapes import random_model
from statebridge.errors import ConfigError, UnsupportedModel
from statebridge.reproduce.config_parts import ModelsConfig


def open_pair(config: ModelsConfig, device: str, receiver_device: str | None = None) -> ModelPair:
    """Load or build the pair of a run.

    Parameters
    ----------
    config
        The models.
    device
        Of both, or of the source.
    receiver_device
        Of the receiver, where it is another.

    Raises
    ------
    UnsupportedModel
        When a model cannot be loaded, or has no tokenizer.
    StateMismatch
        When the tokenizers differ.
    ConfigError
        When the settings contradict each other, or the device is not there.
    """
    places = [device, receiver_device or device]
    turns = config.load == "sequential"
    if turns and (places[0] != places[1] or device == "auto"):
        raise ConfigError('models.load "sequential" is for one device; leave --receiver-device out.')
    if config.random_weights:
        pair = _random_pair(config, places)
    else:
        pair = ModelPair.from_pretrained(
            config.source,
            config.receiver,
            dtype=config.dtype,
            device_map=("cpu", "cpu") if turns else places,
            source_revision=config.source_revision,
            receiver_revision=config.receiver_revision,
        )
    return TurnPair.of(pair, places[0]) if turns else pair


def _random_pair(config: ModelsConfig, places: list[str]) -> ModelPair:
    if config.tokenizer is None:
        raise ConfigError(
            "Random weights have no tokenizer; name a folder or hub name with models.tokenizer."
        )
    if "auto" in places:
        raise ConfigError("Random weights are built on the device that is named; name one with --device.")
    tokenizer = load_tokenizer(config.tokenizer)
    if tokenizer is None:
        raise UnsupportedModel(f"{config.tokenizer} holds no tokenizer; name a folder or hub name with one.")
    ends = ((config.source, config.source_revision), (config.receiver, config.receiver_revision))
    models = []
    for number, ((name, revision), place) in enumerate(zip(ends, places, strict=True)):
        model = random_model(name, config.dtype, place, config.seed + number, revision)
        # built where it computes, which is much faster than on the host
        models.append(model.to("cpu") if config.load == "sequential" else model)
    return ModelPair(models[0], models[1], tokenizer)
