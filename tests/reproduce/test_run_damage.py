"""A run's folder that was tampered with, damaged, shared or half removed: found out, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from statebridge.bridge import ModelPair
from statebridge.bridge.collect import sole_run
from statebridge.errors import ConfigError
from statebridge.reproduce import SuiteConfig, reproduce, verify_suite
from statebridge.reproduce.manifest import digests

Opened = Callable[[], ModelPair]


def closed() -> ModelPair:
    raise AssertionError("the models were opened although the run must be refused first")


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def edit(path: Path, change: Callable[[dict], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def adapt(folder: Path, stage: str) -> None:
    """Make the digests of a stage those of its files, as a careful forger would."""
    found = digests(folder, stage)
    edit(folder / "stages" / f"{stage.replace('/', '.')}.json", lambda r: r.update(artefacts=found))
    edit(folder / "manifest.json", lambda m: m["stages"][stage].update(artefacts=found))


def loosen(folder: Path) -> None:
    """Move a gate's bound, in the settings and in the result, so that it passes."""
    path = folder / "e002" / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["evaluate"]["gates"]["near native"][0]["bound"] = 9.0
    path.write_text(yaml.safe_dump(settings, allow_unicode=True))

    def result(found: dict) -> None:
        gate = found["gates"]["near native"]
        gate["verdict"] = gate["inequalities"][0]["verdict"] = "pass"
        gate["inequalities"][0]["bound"] = 9.0

    edit(folder / "e002" / "result.json", result)


def other_models(manifest: dict) -> None:
    manifest["models"]["receiver"]["weights"] = "0" * 64


def other_document(manifest: dict) -> None:
    known = manifest["documents"]["e002"]
    known[next(iter(known))] = "0" * 64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["stages"].pop("restore"), "stages/restore.json: not in the manifest"),
        (lambda m: m["stages"]["e002"]["cost"].update(seconds=1.0), "stages/e002.json: not as in the manifest"),
        (lambda m: m["config"]["fit"].update(fit_documents=600), "fit: its settings are not those of the manifest"),
        (lambda m: m["config"]["models"].update(dtype="bfloat16"), "documents: its settings are not those"),
        (other_document, "documents: "),
        (other_models, "receiver: its weights are not those that e001 was measured with"),
        (lambda m: m["figures"]["e002"].pop("js"), "figures: e002.js"),
    ],
)  # fmt: skip
def test_verify_finds_a_changed_manifest(change: Callable[[dict], object], said: str, folder: Path) -> None:
    edit(folder / "manifest.json", change)
    found = verify_suite(folder)
    assert any(line.startswith(said) for line in found), found


def test_verify_finds_a_gate_that_was_loosened(folder: Path) -> None:
    loosen(folder)
    adapt(folder, "e002")
    found = verify_suite(folder)
    assert "e002: its settings are not those of the manifest's config" in found
    assert any(line.startswith("e002: its gates came out as") for line in found), found


def test_verify_finds_a_plan_that_is_not_the_chosen_one(folder: Path) -> None:
    path = folder / "selection" / "selection.json"
    other = "DDD" if json.loads(path.read_text())["plan"] != "DDD" else "TTT"
    edit(path, lambda s: s.update(plan=other))
    adapt(folder, "selection")
    found = verify_suite(folder)
    assert any(line.startswith("selection: plan: ") for line in found), found
    assert any(line.startswith("e002: carried out the plan ") for line in found), found


def test_verify_finds_a_restore_control_that_is_said_to_pass(folder: Path) -> None:
    edit(folder / "restore" / "restore.json", lambda r: r["source"]["lengths"][0].update(max_difference=0.5))
    adapt(folder, "restore")
    assert "restore: source is said to have passed and did not" in verify_suite(folder)


def test_verify_lists_damaged_files_and_goes_on(folder: Path) -> None:
    (folder / "e001" / "scores.parquet").write_bytes(b"PAR1")
    (folder / "documents" / "fit.safetensors").write_bytes(b"")
    (folder / "stages" / "long.json").write_text("{")
    found = verify_suite(folder)
    for said in (
        "e001/scores.parquet is damaged",
        "documents/fit.safetensors is damaged",
        "stages/long.json: damaged",
    ):
        assert any(said in line for line in found), (said, found)


@pytest.mark.parametrize(
    ("path", "spoil"),
    [
        ("fit/bridge/model.safetensors", Path.unlink),
        ("documents/e002.safetensors", Path.unlink),
        ("documents/fit.safetensors", lambda path: path.write_bytes(path.read_bytes()[:-4] + b"\1\0\0\0")),
        ("selection/selection.json", lambda path: path.write_text("{}")),
    ],
)
def test_nothing_is_built_on_a_stage_whose_files_are_no_longer_its_own(
    path: str, spoil: Callable[[Path], object], config: SuiteConfig, folder: Path
) -> None:
    (folder / "stages" / "e002.json").unlink()
    spoil(folder / path)
    with pytest.raises(ConfigError, match=f"{path} is (gone|another)"):
        reproduce(config, "all", folder, closed)


def test_a_stage_that_is_removed_is_made_again(
    config: SuiteConfig, opened: Opened, finished: Path, folder: Path
) -> None:
    (folder / "stages" / "e002.json").unlink()
    shutil.rmtree(folder / "e002")
    lines: list[str] = []
    manifest = reproduce(config, "all", folder, opened, say=lines.append)
    assert [line.split(":")[0] for line in lines if "finished before" not in line] == ["e002"]
    assert manifest["figures"] == json.loads((finished / "manifest.json").read_text())["figures"]
    assert verify_suite(folder) == []


def test_settings_of_the_other_experiment_are_compared_too(config: SuiteConfig, folder: Path) -> None:
    """Else the manifest would show settings with which experiment 1 was never run."""
    other = dataclasses.replace(config, e001=dataclasses.replace(config.e001, gates={}))
    with pytest.raises(ConfigError, match=r"another e001\.gates"):
        reproduce(other, "e002", folder, closed)


def test_a_folder_belongs_to_one_process(config: SuiteConfig, folder: Path) -> None:
    (folder / "stages" / "e002.json").unlink()
    with sole_run(folder, 0), pytest.raises(ConfigError, match="Another process works in"):
        reproduce(config, "all", folder, closed)


def test_scratch_that_a_kill_left_is_removed(config: SuiteConfig, folder: Path) -> None:
    """Killed after the record was written and before the scratch files were gone."""
    (folder / "fit" / "work").mkdir()
    (folder / "fit" / "work" / "R.bin").write_bytes(b"0" * 100)
    reproduce(config, "all", folder, closed)
    assert not (folder / "fit" / "work").exists()
