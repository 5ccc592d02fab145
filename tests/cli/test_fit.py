"""`statebridge fit`: what it prints, saves, resumes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_pair
import typer
from typer.testing import CliRunner, Result

from statebridge.bridge import Bridge
from statebridge.cli.fit import fit
from statebridge.errors import ConfigError, DocumentError, StatebridgeError, UnsupportedModel

APP = typer.Typer()
APP.command()(fit)
SETTINGS = [
    f"--set={key}={list(value) if isinstance(value, tuple) else value}"
    for key, value in tiny_pair.SMALL.items()
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both models and documents as folders."""
    root = tmp_path_factory.mktemp("fit")
    pair = tiny_pair.pair()
    for name, model in (("small", pair.source), ("big", pair.receiver)):
        model.save_pretrained(root / name)
        pair.tokenizer.save_pretrained(root / name)
    (root / "docs").mkdir()
    for document in tiny_pair.documents(14):
        (root / "docs" / f"{document.id}.txt").write_text(document.text)
    return root


def run(root: Path, *options: str) -> Result:
    models = ["--source", str(root / "small"), "--receiver", str(root / "big")]
    result = CliRunner().invoke(APP, [*models, "--documents", str(root / "docs"), *SETTINGS, *options])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_bridge_and_a_table(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "bridge"
    result = run(root, "--out", str(out), "--set", "plan=DTD")
    assert result.exit_code == 0
    for word in ("translated", "copied", "keys", "values", "R", "C", f"lies in {out} (plan DTD"):
        assert word in result.stdout
    for line in ("Loading", "R matrices take 0.26 MB", "Reading documents", "14/14", "Fitting maps", "8/8"):
        assert line in result.stderr
        assert line not in result.stdout
    bridge = Bridge.from_pretrained(out)
    assert bridge.config.plan == "DTD"
    assert bridge.config.fit["settings"]["fit_documents"] == 10
    # no path of this machine goes into what may be published
    assert "/" not in bridge.config.fit["settings"]["documents"]["source"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bridge"]  # no work_dir is left


def test_json_is_one_object(root: Path, tmp_path: Path) -> None:
    result = run(root, "--out", str(tmp_path / "b"), "--format", "json", "--seed", "5")
    record = json.loads(result.stdout)
    assert record["bridge"] == str(tmp_path / "b")
    assert record["fit"]["settings"]["seed"] == 5
    assert record["fit"]["errors"] == Bridge.from_pretrained(tmp_path / "b").config.fit["errors"]


def test_models_that_take_turns_give_the_same_bridge(root: Path, tmp_path: Path) -> None:
    one, two = (tmp_path / name for name in ("sequential", "together"))
    for out in (one, two):
        run(root, "--out", str(out), "--load", out.name)
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="for one device"):
        run(root, "--out", str(tmp_path / "b"), "--load", "sequential", "--device", "auto")


def test_it_resumes_and_keeps_its_own_work_dir(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--out", str(tmp_path / "b"), "--work-dir", str(tmp_path / "w"))
    with monkeypatch.context() as patch:
        patch.setattr("statebridge.bridge.fit._fit_one", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(root, *options).exit_code != 0
    monkeypatch.setattr(
        "statebridge.bridge.collect.prefill", lambda *_: pytest.fail("a document was read again")
    )
    result = run(root, *options)
    assert result.exit_code == 0
    assert "Going on with the run in" in result.stderr
    assert (tmp_path / "w" / "run.json").exists()


@pytest.mark.parametrize(
    ("options", "error", "code"),
    [
        (["--set", "fit_documnets=3"], ConfigError, 2),
        (["--config", "absent.yaml"], ConfigError, 2),
        (["--device", "cuda:99"], ConfigError, 2),
        (["--documents", "absent.jsonl"], DocumentError, 1),
        (["--set", "fit_documents=11"], DocumentError, 1),
        (["--source", "no/model"], UnsupportedModel, 4),
    ],
)
def test_errors(
    root: Path, tmp_path: Path, options: list[str], error: type[StatebridgeError], code: int
) -> None:
    with pytest.raises(error) as raised:
        run(root, "--out", str(tmp_path / "b"), *options)
    assert raised.value.exit_code == code
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "b").exists()
