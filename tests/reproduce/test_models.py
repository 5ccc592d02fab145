"""Models that take turns on one device give what models held together give; what cannot be opened is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_pair
import torch

from statebridge.bridge import ModelPair, TokenWindow
from statebridge.bridge.collect import collect
from statebridge.bridge.turns import TurnPair
from statebridge.errors import ConfigError, UnsupportedModel
from statebridge.evaluate.config import GenerationConfig, RecallConfig
from statebridge.reproduce import SuiteConfig, open_pair, reproduce
from statebridge.reproduce.config_parts import ModelsConfig
from statebridge.reproduce.stages import read_json, stages_of


class Placed:
    """A model that is anywhere it is told to be; computes on the host all the same."""

    def __init__(self, model: Any, moves: list[tuple[str, str]], name: str) -> None:
        self.model, self.moves, self.name, self.place = model, moves, name, torch.device("cpu")

    @property
    def device(self) -> torch.device:
        return self.place

    def to(self, device: Any) -> None:
        if torch.device(device) != self.place:
            self.moves.append((self.name, torch.device(device).type))
        self.place = torch.device(device)


def test_whichever_is_asked_for_comes_and_the_other_leaves() -> None:
    moves: list[tuple[str, str]] = []
    models = [Placed(None, moves, name) for name in ("source", "receiver")]
    pair = TurnPair.of(ModelPair(models[0], models[1], None), "cuda:0")
    for _ in range(2):
        assert pair.source.device.type == "cuda"
    assert (models[0].place.type, models[1].place.type) == ("cuda", "cpu")
    assert pair.receiver.device.type == "cuda"
    assert (models[0].place.type, models[1].place.type) == ("cpu", "cuda")
    assert moves == [("source", "cuda"), ("source", "cpu"), ("receiver", "cuda")]
    assert pair.takes_turns
    assert pair.tokenizer is None


class Turns(TurnPair):
    """Takes turns on the host itself, and counts how often the model changes."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("source", "receiver"):
            changes = object.__getattribute__(self, "changes")
            if not changes or changes[-1] != name:
                changes.append(name)
        return super().__getattribute__(name)


def turns() -> Any:
    base = tiny_pair.pair()
    pair = Turns.__new__(Turns)
    object.__setattr__(pair, "changes", [])
    Turns.__init__(pair, base.source, base.receiver, base.tokenizer)
    object.__setattr__(pair, "device", torch.device("cpu"))
    return pair


def test_taking_turns_changes_nothing_and_changes_seldom(
    config: SuiteConfig, finished: Path, tmp_path: Path
) -> None:
    """Bit-exact: the same passes in another order. A batch of the fit costs one change for all its lengths."""
    pair = turns()
    reproduce(config, "e001", tmp_path / "run", lambda: pair)
    for name in ("fit/bridge/model.safetensors", "e001/scores.parquet"):
        assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()
    figures = [
        read_json(folder / "manifest.json")["figures"]["e001"] for folder in (tmp_path / "run", finished)
    ]
    assert figures[0] == figures[1]
    reads: list[int] = []
    windows = {
        split: [TokenWindow(f"{split} {n}", torch.arange(32) + n) for n in range(2)]
        for split in ("validation", "fit")
    }
    settings = dataclasses.replace(config.fit, checkpoints=(8, 16, 32), batch_size=2)
    collect(
        pair, windows, settings, tmp_path / "work", lambda what, done, total: reads.append(len(pair.changes))
    )
    # the last two entries of the progress are one batch apart: source and receiver once each
    assert reads[-1] - reads[-2] == 2


def test_both_kinds_of_models_open(config: SuiteConfig) -> None:
    found = open_pair(config.models, "cpu")
    assert not found.takes_turns
    assert open_pair(dataclasses.replace(config.models, load="sequential"), "cpu").takes_turns
    random = dataclasses.replace(config.models, random_weights=True, tokenizer=config.models.source)
    made = open_pair(random, "cpu")
    assert made.source_identity.layers == found.source_identity.layers
    assert made.source_identity.weights != found.source_identity.weights
    assert made.source_identity.weights != made.receiver_identity.weights


@pytest.mark.parametrize(
    ("change", "places", "error", "message"),
    [
        ({"load": "sequential"}, ("cpu", "meta"), ConfigError, "is for one device"),
        ({"load": "sequential"}, ("auto", None), ConfigError, "is for one device"),
        ({"random_weights": True}, ("cpu", None), ConfigError, "models.tokenizer"),
        ({"random_weights": True, "tokenizer": "nowhere"}, ("cpu", None), UnsupportedModel, "no tokenizer"),
        ({"random_weights": True, "tokenizer": "x"}, ("auto", None), ConfigError, "name one with --device"),
        ({"source": "nowhere"}, ("cpu", None), UnsupportedModel, "nowhere cannot be loaded"),
    ],
)
def test_what_cannot_be_opened_is_refused(
    config: SuiteConfig, change: dict, places: tuple, error: type[Exception], message: str
) -> None:
    models: ModelsConfig = dataclasses.replace(config.models, **change)
    with pytest.raises(error, match=message):
        open_pair(models, *places)


@pytest.mark.parametrize(
    ("stage", "change"),
    [
        ("e002", lambda c: dataclasses.replace(c, recall=RecallConfig(items_per_depth=1))),
        ("e001", lambda c: dataclasses.replace(c, generation=GenerationConfig(documents=2))),
        ("calibrate", lambda c: dataclasses.replace(c, states="recompute")),
        ("calibrate", lambda c: dataclasses.replace(c, states="device")),
    ],
)
def test_taking_turns_refuses_what_needs_both_models(
    config: SuiteConfig, stage: str, change: Callable[[Any], Any]
) -> None:
    models = dataclasses.replace(config.models, load="sequential")
    dataclasses.replace(config, models=models)
    with pytest.raises(ConfigError, match=f"{stage}.* needs both models"):
        dataclasses.replace(config, models=models, **{stage: change(getattr(config, stage))})


def test_where_models_and_states_are_held_is_no_setting_of_a_run(config: SuiteConfig) -> None:
    """A run that ran out of memory goes on in its folder with them elsewhere."""
    elsewhere = [
        dataclasses.replace(config, models=dataclasses.replace(config.models, load="sequential")),
        dataclasses.replace(config, calibrate=dataclasses.replace(config.calibrate, states="device")),
    ]
    wanted = [stage.settings for stage in stages_of(config, "all")]
    assert all([stage.settings for stage in stages_of(other, "all")] == wanted for other in elsewhere)
    other = dataclasses.replace(config, calibrate=dataclasses.replace(config.calibrate, max_steps=5))
    assert [stage.settings for stage in stages_of(other, "all")] != wanted
