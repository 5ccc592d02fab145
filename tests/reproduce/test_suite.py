"""A run is done once, goes on after a kill at any stage, and belongs to its settings."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from statebridge.bridge import ModelPair
from statebridge.errors import ConfigError
from statebridge.reproduce import SuiteConfig, reproduce, verify_suite
from statebridge.reproduce.manifest import digests
from statebridge.reproduce.plan import Sizes, expect
from statebridge.reproduce.stages import stages_of

Opened = Callable[[], ModelPair]


class KilledError(Exception):
    """What a kill is in these tests."""


def closed() -> ModelPair:
    raise AssertionError("the models were opened although nothing was left to do")


def manifest_of(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def test_every_stage_runs_and_the_run_verifies(config: SuiteConfig, finished: Path) -> None:
    stages = manifest_of(finished)["stages"]
    assert list(stages) == [stage.name for stage in stages_of(config, "all")]
    assert all(record["finished"] and not record["resumed"] for record in stages.values())
    assert stages["restore"]["outcome"] == {"passed": True}
    assert verify_suite(finished) == []
    assert not list(finished.rglob("work"))
    assert not list(finished.rglob("parts"))


def test_what_a_stage_announces_is_what_it_reads(config: SuiteConfig, finished: Path) -> None:
    """Tokens counted at the embeddings equal the plan's; probes of a few single tokens come on top."""
    expected = expect(config, Sizes.of(config))
    for name in ("fit", "e001", "selection", "e002", "shifted/further"):
        cost = manifest_of(finished)["stages"][name]["cost"]
        assert (cost["source_tokens"], cost["receiver_tokens"]) == (
            expected[name].source_tokens,
            expected[name].receiver_tokens,
        ), name
        assert cost["disk_bytes"] > 0
        assert cost["seconds"] > 0
        assert cost["host_bytes"] > 2**20


def test_a_finished_run_opens_no_model_and_repeats_no_stage(config: SuiteConfig, finished: Path) -> None:
    def times() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in finished.glob("*/**/*") if path.is_file()}

    before = times()
    lines: list[str] = []
    again = reproduce(config, "all", finished, closed, say=lines.append)
    assert times() == before | {p: t for p, t in times().items() if "report_files" in p.parts}
    assert all("finished before" in line for line in lines)
    assert len(lines) == len(again["stages"])
    assert verify_suite(finished) == []


@pytest.mark.slow
def test_killed_at_every_stage_it_gives_the_same_figures(
    config: SuiteConfig, opened: Opened, finished: Path, tmp_path: Path
) -> None:
    """Killed once in each kind of work, first through experiment 1, then through experiment 2, which joins it."""
    folder = tmp_path / "run"
    reached: list[str] = []
    lines: list[str] = []

    def killing(what: str, done: int, total: int) -> None:
        if done == total and what not in reached:  # at the end of the work, before it is recorded
            reached.append(what)
            raise KilledError(what)

    for experiment, figures in (("e001", {"e001"}), ("e002", {"e001", "selection", "e002"})):
        for _ in range(20):
            lines.clear()
            try:
                reproduce(config, experiment, folder, opened, progress=killing, say=lines.append)
            except KilledError:
                continue
            break
        assert set(manifest_of(folder)["figures"]) == figures
    # what was finished before a kill, or by the other experiment, was not done again
    assert lines[0].startswith("documents: finished before")
    assert "fit: finished before" in lines[2]
    assert {"draw documents", "restore control", "collect", "fit", "scores", "read documents"} < set(reached)
    assert {"calibrate", "ablate", "residuals"} < set(reached)
    ours, theirs = manifest_of(folder), manifest_of(finished)
    assert ours["figures"] == theirs["figures"]
    assert ours["documents"] == theirs["documents"]
    assert ours["stages"]["fit"]["resumed"]
    assert ours["stages"]["calibrate"]["resumed"]
    for name in ("fit/bridge/model.safetensors", "calibrate/bridge/model.safetensors"):
        assert (folder / name).read_bytes() == (finished / name).read_bytes()
    assert verify_suite(folder) == []


@pytest.mark.parametrize(
    ("stage", "change", "named"),
    [
        ("fit", {"fit_documents": 5}, "sets.fit.count, fit.fit_documents"),
        ("e002", {"windows": (5,)}, "e002.windows"),
        ("models", {"dtype": "bfloat16"}, "models.dtype"),
    ],
)
def test_changed_settings_are_refused_before_anything_is_opened(
    config: SuiteConfig, finished: Path, stage: str, change: dict, named: str
) -> None:
    other = dataclasses.replace(config, **{stage: dataclasses.replace(getattr(config, stage), **change)})
    with pytest.raises(ConfigError, match="holds a run with another") as error:
        reproduce(other, "all", finished, closed)
    assert any(name in str(error.value) for name in named.split(", "))


def test_where_models_are_held_may_change(config: SuiteConfig, finished: Path) -> None:
    models = dataclasses.replace(config.models, load="sequential")
    reproduce(dataclasses.replace(config, models=models), "all", finished, closed)


def test_a_stage_made_from_other_inputs_is_refused(
    config: SuiteConfig, opened: Opened, finished: Path, tmp_path: Path
) -> None:
    """The fit is done again, with another outcome, below stages that were made from the old one."""
    folder = shutil.copytree(finished, tmp_path / "run")
    path = folder / "stages" / "fit.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"digest": "0" * 64}))
    with pytest.raises(ConfigError, match=r"The stage e001 .* another outcome of fit"):
        reproduce(config, "all", folder, closed)


def test_an_unknown_experiment_is_refused(config: SuiteConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no experiment 'e003'"):
        reproduce(config, "e003", tmp_path / "run", closed)


def test_too_small_a_disk_is_refused_before_the_stage(
    config: SuiteConfig, opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = expect(config, Sizes.of(config))["fit"].disk_bytes
    free = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr("statebridge.reproduce.suite.shutil.disk_usage", lambda path: free)
    with pytest.raises(ConfigError, match="The stage fit needs"):
        reproduce(config, "e001", tmp_path / "run", opened)
    assert not (tmp_path / "run" / "fit" / "work").exists()


def test_the_long_branch_waits_for_its_gate(
    config: SuiteConfig, opened: Opened, finished: Path, tmp_path: Path
) -> None:
    assert manifest_of(finished)["stages"]["long"]["outcome"] == {
        "gate": "near native",
        "verdict": "fail",
        "status": "not run",
    }
    assert not (finished / "long" / "result.json").exists()
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "stages" / "long.json").unlink()
    asked = dataclasses.replace(config, long=dataclasses.replace(config.long, on_request=True))
    outcome = reproduce(asked, "e002", folder, opened)["stages"]["long"]["outcome"]
    assert outcome["status"] == "on request"
    result = json.loads((folder / "long" / "result.json").read_text())
    assert result["provenance"]["documents"] == list(manifest_of(folder)["documents"]["long"])


def test_verify_finds_a_changed_score_and_a_changed_artefact(finished: Path, tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = shutil.copytree(finished, tmp_path / "run")
    path = folder / "e002" / "scores.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    next(row for row in rows if row["arm"] == "calibrated")["nll"] += 0.01
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)
    found = verify_suite(folder)
    assert "e002/scores.parquet: its sha256 is not that of the manifest" in found
    assert any(line.startswith("e002: arms.") for line in found)
    # a manifest that was adapted to the changed file is still found out by the figures
    manifest = manifest_of(folder)
    manifest["stages"]["e002"]["artefacts"] = digests(folder, "e002")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert {line.split(":")[0] for line in verify_suite(folder)} == {"e002", "figures", "stages/e002.json"}

    (folder / "fit" / "bridge" / "README.md").write_text("another card")
    (folder / "documents" / "extra.txt").write_text("")
    (folder / "restore" / "restore.json").unlink()
    found = verify_suite(folder)
    assert "fit/bridge/README.md: its sha256 is not that of the manifest" in found
    assert "documents/extra.txt: not in the manifest" in found
    assert "restore/restore.json: missing" in found
