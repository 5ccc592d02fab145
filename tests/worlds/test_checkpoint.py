"""The shipped world model remembers: a view that was left comes back, and not when its history is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from experiments.small_world.data import HELD_OUT
from experiments.small_world.judge import continued, error, psnr, walked
from statebridge.errors import StateFileError
from statebridge.worlds.motion import STAY
from statebridge.worlds.rollout import everything, last_chunks
from statebridge.worlds.trajectories import look_away_and_back
from statebridge.worlds.weights import load_world

FOLDER = Path(__file__).parents[2] / "checkpoints" / "world"


def test_a_view_that_was_left_comes_back() -> None:
    model = load_world(FOLDER)
    seeds = torch.arange(HELD_OUT + 5, HELD_OUT + 7)  # neither training nor judging used these
    actions = torch.tensor([[STAY] * 4 + look_away_and_back(8)] * 2)
    truth = walked(model, seeds, actions)
    for remember, lowest, highest in ((everything, 28, 60), (last_chunks(1), 0, 22)):
        returned = continued(model, truth, 4, remember, 0)[:, -1]
        found = psnr(error(returned, truth.frames[:, 3]))
        assert ((found > lowest) & (found < highest)).all(), found


def test_a_folder_that_is_no_world_model_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(StateFileError, match="no readable world model"):
        load_world(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((FOLDER / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes((FOLDER / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(StateFileError, match="no readable world model"):
        load_world(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 99}')
    with pytest.raises(StateFileError, match="99"):
        load_world(tmp_path)
