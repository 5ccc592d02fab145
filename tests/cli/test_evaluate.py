"""`statebridge evaluate` and `statebridge report`: tables on stdout, progress on stderr, exit codes, the folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny_pair
import typer
from typer.testing import CliRunner, Result

from statebridge.bridge import Bridge
from statebridge.bridge.turns import TurnPair
from statebridge.cli.evaluate import evaluate
from statebridge.cli.report import report
from statebridge.config import load_config
from statebridge.errors import ConfigError, StatebridgeError
from statebridge.evaluate.config import EvaluateConfig
from statebridge.evaluate.report.words import interval, number

APP = typer.Typer()
APP.command()(evaluate)
APP.command()(report)
CONFIGS = Path(__file__).parents[2] / "configs"
SETTINGS = [
    "count=3",
    "prefix=40",
    "targets=3",
    "plans=[]",
    "windows=[4]",
    "handover_windows=[4]",
    "resamples=50",
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both models, their direct bridge and documents as folders, and one finished run."""
    root = tmp_path_factory.mktemp("evaluate")
    pair = tiny_pair.pair()
    for name, model in (("small", pair.source), ("big", pair.receiver)):
        model.save_pretrained(root / name)
        pair.tokenizer.save_pretrained(root / name)
    Bridge.direct(pair.source_identity, pair.receiver_identity).save_pretrained(root / "bridge")
    (root / "docs").mkdir()
    for document in tiny_pair.documents(4):
        (root / "docs" / f"{document.id}.txt").write_text(document.text)
    return root


def run(root: Path, out: Path, *options: str) -> Result:
    places = [f"--{name}={root / folder}" for name, folder in (("source", "small"), ("receiver", "big"))]
    places += [f"--bridge={root / 'bridge'}", f"--documents={root / 'docs'}", f"--out={out}"]
    return invoke("evaluate", *places, *(f"--set={setting}" for setting in SETTINGS), *options)


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(APP, arguments, env={"COLUMNS": "120"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def first(root: Path) -> Result:
    return run(root, root / "run")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("│")[1:-1]]


def test_tables_show_each_arms_own_numbers(root: Path, first: Result) -> None:
    assert first.exit_code == 0
    stored = json.loads((root / "run" / "result.json").read_text())
    rows = {line[0]: line[1:] for line in map(cells, first.stdout.splitlines()) if len(line) == 5}
    names = {"native": "native", "DDD": "hand-over (DDD)", "window 4": "last 4 read", "kv only": "K only"}
    for arm, shown in names.items():
        found = stored["arms"][arm]
        assert rows[shown] == [
            number(found["nll"]["estimate"]),
            interval(found["excess"]),
            interval(found["ncr"], 2),
            number(found["top1"]["estimate"]),
        ]
    verdicts = [line[3] for line in map(cells, first.stdout.splitlines()) if len(line) == 4]
    gates = stored["gates"].values()
    assert verdicts == [row["verdict"] for gate in gates for row in gate["inequalities"]]


def test_progress_is_no_data(root: Path, first: Result) -> None:
    assert "Loading" in first.stderr
    assert "Writing the report" in first.stderr
    assert "Loading" not in first.stdout
    for name in ("config.yaml", "scores.parquet", "result.json", "report.html", "report.md"):
        assert (root / "run" / name).is_file()
    assert str(root / "run" / "report.html") in first.stdout


def test_a_failed_gate_matters_only_under_strict(root: Path, first: Result, tmp_path: Path) -> None:
    gate = '--set=gates={impossible: [{metric: nll, relation: "<=", bound: 0}]}'
    again = run(root, tmp_path / "run", gate, "--format=json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["gates"]["impossible"]["verdict"] == "fail"
    # the folder is there, so nothing is scored twice
    assert run(root, tmp_path / "run", gate, "--strict").exit_code == 3
    possible = '--set=gates={possible: [{metric: nll, relation: ">=", bound: 0}]}'
    assert run(root, tmp_path / "other", possible, "--strict").exit_code == 0


def test_contradictions_are_usage_errors(root: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="window"):
        run(root, tmp_path / "run", "--set=windows=[40]")
    with pytest.raises(ConfigError, match=r"branches.0.pre"):
        run(root, tmp_path / "run", "--set=branches=[{name: a, prefix: 9, pre: 1}]")
    assert not (tmp_path / "run").exists()


def test_models_loaded_one_after_the_other_score_alike(
    root: Path, first: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit-exact: the same passes of the same models."""
    taken: list[TurnPair] = []
    of = TurnPair.of
    monkeypatch.setattr(TurnPair, "of", lambda pair, place: taken.append(of(pair, place)) or taken[-1])
    assert run(root, tmp_path / "run", "--load=sequential").exit_code == 0
    assert [pair.device.type for pair in taken] == ["cpu"]
    one, other = (json.loads((at / "run" / "result.json").read_text()) for at in (root, tmp_path))
    assert one["arms"] == other["arms"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--load=sequential", "--device=auto"], "for one device"),
        (["--load=sequential", "--receiver-device=cpu"], "for one device"),
        (["--load=sequential", "--set=generation.documents=2"], "recall and generation need both models"),
        (["--load=sequential", "--set=recall.items_per_depth=1"], "recall and generation need both models"),
        (["--receiver-device=nowhere"], "The device nowhere is not there"),
    ],
)
def test_places_that_contradict_each_other_are_refused(
    options: list[str], message: str, root: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(root, tmp_path / "run", *options)


def test_report_is_written_again(root: Path, first: Result, tmp_path: Path) -> None:
    copy = shutil.copytree(root / "run", tmp_path / "run")
    before = {name: (copy / name).read_bytes() for name in ("report.html", "report.md")}
    for name in before:
        (copy / name).unlink()
    assert invoke("report", str(copy)).stdout.split() == [str(copy / name) for name in before]
    # the same numbers give the same bytes, pictures included
    assert {name: (copy / name).read_bytes() for name in before} == before


def test_verify_names_the_figure_and_exits_with_3(root: Path, first: Result, tmp_path: Path) -> None:
    assert invoke("report", "--verify", str(root / "run")).exit_code == 0
    copy = shutil.copytree(root / "run", tmp_path / "run")
    result = json.loads((copy / "result.json").read_text())
    result["arms"]["empty"]["js"]["high"] = 0.5
    (copy / "result.json").write_text(json.dumps(result))
    found = invoke("report", "--verify", str(copy))
    assert found.exit_code == 3
    assert found.stdout.startswith("arms.empty.js.high: result.json says 0.5")
    with pytest.raises(StatebridgeError, match="not a finished run"):
        invoke("report", str(tmp_path))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("evaluate_*.yaml")), ids=lambda path: path.stem)
def test_shipped_configs_are_read(path: Path) -> None:
    config = load_config(EvaluateConfig, path)
    assert "near native" in config.gates
    # a hand-over followed by W tokens needs its plain read of W to be compared with
    assert set(config.handover_windows) <= set(config.windows)
