"""`statebridge reproduce`: the smoke run from start to report, the plan, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from statebridge.cli.app import app
from statebridge.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def invoke(*arguments: object) -> object:
    return CliRunner().invoke(app, ["reproduce", *map(str, arguments)], env={"COLUMNS": "200"})


@pytest.mark.slow
def test_smoke_runs_both_experiments_from_start_to_report(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = invoke("all", "--smoke", "--out", out, "--format", "json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["gates"]["restore control"] == "pass"
    assert set(said["figures"]) == {"e001", "selection", "e002"}
    text = (out / "report.md").read_text()
    for heading in (
        "## Experiment 1 beside the published figures",
        "## Which plan, and why",
        "## How the calibrator was trained",
        "## Experiment 2 beside the published figures",
        "## Restore control",
        "## Other domains and lengths",
        "## What it cost",
        "## Whose numbers these are",
    ):
        assert heading in text, heading
    assert "<img" in (out / "report.html").read_text()
    verified = CliRunner().invoke(app, ["report", "--verify", str(out)])
    assert verified.exit_code == 0, verified.output
    # the second call finds everything done, and a failed gate is an exit code on request
    again = invoke("all", "--smoke", "--out", out, "--strict")
    assert again.stderr.count("finished before") == 9
    assert again.exit_code == (3 if "fail" in said["gates"].values() else 0)


@pytest.mark.parametrize("name", ["qwen3_5_4b_9b", "qwen3_5_0.8b_2b", "reference_pair"])
def test_every_shipped_config_has_a_plan(name: str, tmp_path: Path) -> None:
    options = [
        "--config",
        CONFIGS / f"{name}.yaml",
        "--out",
        tmp_path / "run",
        "--dry-run",
        "--format",
        "json",
    ]
    result = invoke("all", *options, "--source", "Qwen/Qwen3.5-4B-Base", "--set", "e002.count=10")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert plan["models"]["source"]["state_bytes_at_prefix"] == (
        186_122_240 if name != "reference_pair" else plan["models"]["source"]["state_bytes_at_prefix"]
    )
    assert plan["stages"]["e002"]["documents"] == 10
    assert not (tmp_path / "run").exists()


def test_the_plan_is_a_table(tmp_path: Path) -> None:
    result = invoke(
        "e001", "--config", CONFIGS / "qwen3_5_4b_9b.yaml", "--out", tmp_path / "run", "--dry-run"
    )
    assert "128.8 GB" in result.stdout
    assert "4,205,751,296 parameters" in result.stdout
    assert "selection" not in result.stdout


def test_the_plan_fits_into_a_terminal_of_80_columns(tmp_path: Path) -> None:
    arguments = [
        "reproduce",
        "all",
        "--config",
        str(CONFIGS / "qwen3_5_4b_9b.yaml"),
        "--out",
        str(tmp_path / "run"),
    ]
    arguments += ["--set", "shifted.proposals.documents.source=books", "--dry-run"]
    plain = CliRunner().invoke(app, arguments, env={"COLUMNS": "80"}).stdout
    table, _ = plain.split("source: Qwen")
    assert max(map(len, table.splitlines())) <= 80
    rows = [line.split() for line in table.splitlines()]
    stages = json.loads(CliRunner().invoke(app, [*arguments, "--format", "json"]).stdout)["stages"]
    assert "shifted/proposals" in stages
    for name, stage in stages.items():
        read, held = (row for row in rows if row and row[0] == name)
        counts = {key for key in stage if key.endswith(("_passes", "_tokens"))} - {"trained_passes"}
        assert read[1:] == [
            f"{value:,}" for key, value in stage.items() if value and key in {"documents", *counts}
        ]
        assert held[-1] in ("min", "h")


@pytest.mark.slow
def test_random_weights_take_the_shape_alone(tmp_path: Path) -> None:
    """The shipped pair's shapes with random weights, experiment 1: nothing of the checkpoints is used."""
    out = tmp_path / "run"
    settings = [option for key in ("fit.fit_documents=4", "e001.count=2") for option in ("--set", key)]
    result = invoke("e001", "--smoke", "--random-weights", "--out", out, *settings)
    assert result.exit_code == 0, result.output
    models = json.loads((out / "manifest.json").read_text())["models"]
    assert models["source"]["name"].startswith("random weights in the shape of")
    assert "scores mean nothing" in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--smoke", "--config", "x.yaml"], "--smoke has settings of its own"),
        (["--smoke", "--documents", "books"], "must have the form SET=SOURCE"),
        (["--smoke", "--documents", "e003=books"], "there is no set 'e003'"),
        (["--set", "long.prefix=3", "--set", "long.behind=nothing"], "names the gate 'nothing'"),
        (["--set", "selection.plans=[TDD]"], "selection.plans must be"),
        (["--set", "shifted.fit.documents.source=books"], "'fit' is the name of another set"),
        (["--set", "e001.branches=[{name: a, prefix: 9}]"], "e001.branches"),
        (["--set", "shifted.a.document.source=books"], "shifted.a"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    given = options if "--smoke" in options else [*options, "--config", CONFIGS / "qwen3_5_4b_9b.yaml"]
    result = invoke("all", "--out", tmp_path / "run", *given)
    assert isinstance(result.exception, ConfigError), result.output
    assert message in str(result.exception)
