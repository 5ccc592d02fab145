"""`statebridge calibrate`: a calibrated bridge in a folder, its card, resuming, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_pair
from typer.testing import CliRunner

from statebridge.bridge import Bridge
from statebridge.cli.app import app
from statebridge.errors import ConfigError, DocumentError

SETTINGS = {
    "prefix": 32,
    "positions": 3,
    "ranks": "[2]",
    "penalties": "[0.01,0.1]",
    "max_steps": 4,
    "evaluate_every": 2,
    "batch_size": 3,
    "micro_batch": 3,
    "learning_rate": 0.02,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found, pair = tmp_path_factory.mktemp("pair"), tiny_pair.pair()
    for end in ("source", "receiver"):
        getattr(pair, end).save_pretrained(found / end)
        pair.tokenizer.save_pretrained(found / end)
    Bridge.direct(pair.source_identity, pair.receiver_identity).save_pretrained(found / "bridge")
    return found


def invoke(folder: Path, out: Path, *options: str) -> object:
    arguments = ["calibrate", "--out", str(out), "--documents", "installed:100"]
    for name in ("source", "receiver", "bridge"):
        arguments += [f"--{name}", str(folder / name)]
    arguments += ["--fit-documents", "4", "--validation-documents", "2"]
    for key, value in SETTINGS.items():
        arguments += ["--set", f"{key}={value}"]
    return CliRunner().invoke(app, [*arguments, *options])


def test_a_calibrated_bridge_is_saved_with_its_scores(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = invoke(folder, out, "--format", "json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    bridge = Bridge.from_pretrained(out)
    assert bridge.calibrator is not None
    assert said["calibration"]["chosen"] == bridge.config.calibration["chosen"]
    documents = bridge.config.calibration["documents"]
    assert len(documents["fit"]) == 4
    assert documents["validation"] == ["installed:0:0", "installed:0:100"]
    card = (out / "README.md").read_text()
    grid = [line for line in card.splitlines() if line.startswith(("| 2 | 0.01 |", "| 2 | 0.1 |"))]
    assert len(grid) == 2
    chosen = bridge.config.calibration["chosen"]
    assert any(line.endswith(f"| {chosen['step']} | {chosen['validation_kl']:.5f} |") for line in grid)
    kl = {name: sum(x) / len(x) for name, x in bridge.config.calibration["validation_kl"].items()}
    assert f"| the plan alone | {kl['plan']:.5f} |" in card
    assert f"| calibrated without R | {kl['without R']:.5f} |" in card
    assert not out.with_name("out.work").exists()


def test_it_goes_on_and_refuses_another_run(folder: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    assert invoke(folder, tmp_path / "a", "--work-dir", str(work)).exit_code == 0
    again = invoke(folder, tmp_path / "b", "--work-dir", str(work))
    assert "Going on with the run" in again.stderr
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in "ab")
    assert one == two
    other = invoke(folder, tmp_path / "c", "--work-dir", str(work), "--seed", "1")
    assert isinstance(other.exception, ConfigError)
    assert "setting seed" in str(other.exception)


def test_documents_of_both_splits_are_kept_apart(folder: Path, tmp_path: Path) -> None:
    result = invoke(folder, tmp_path / "out", "--validation", "installed:100")
    assert isinstance(result.exception, DocumentError)
    assert "in both splits" in str(result.exception)


def test_a_window_that_is_none_is_refused(folder: Path, tmp_path: Path) -> None:
    result = invoke(folder, tmp_path / "out", "--window", "end")
    assert isinstance(result.exception, ConfigError)
    assert "--window end" in str(result.exception)


def test_models_that_take_turns_keep_their_states_on_disk(folder: Path, tmp_path: Path) -> None:
    for states in ("recompute", "device"):
        result = invoke(folder, tmp_path / "out", "--load", "sequential", "--set", f"states={states}")
        assert isinstance(result.exception, ConfigError)
        assert f'states "{states}" needs both models' in str(result.exception)
    one, two = (tmp_path / name for name in ("sequential", "together"))
    for out in (one, two):
        assert invoke(folder, out, "--load", out.name, "--set", "max_steps=2").exit_code == 0
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
