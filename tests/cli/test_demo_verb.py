"""`statebridge demo` on a tiny pair: what it prints, saves and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny_pair
import typer
from typer.testing import CliRunner, Result

import statebridge
from statebridge.bridge import Bridge
from statebridge.cli.demo import demo, find_checkpoints
from statebridge.errors import ConfigError
from statebridge.evaluate import demo as path
from statebridge.evaluate.arms import Protocol

APP = typer.Typer()
APP.command()(demo)


@pytest.fixture(scope="module")
def pair_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    pair = tiny_pair.pair()
    for name, model in (("source", pair.source), ("receiver", pair.receiver)):
        model.save_pretrained(folder / name)
        pair.tokenizer.save_pretrained(folder / name)
    Bridge.direct(pair.source_identity, pair.receiver_identity).save_pretrained(folder / "bridge")
    return folder


@pytest.fixture(scope="module")
def shown(pair_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(path, "Protocol", lambda: Protocol(96, 8))
        options = ["--checkpoints", str(pair_folder), "--out", str(out)]
        result = CliRunner().invoke(APP, options, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.exception
    return result, out


def test_table_shows_what_was_measured(shown: tuple[Result, Path]) -> None:
    result, out = shown
    stored = json.loads((out / "demo.json").read_text())
    lines = [[c.strip() for c in line.split("│")[1:-1]] for line in result.stdout.splitlines()]
    rows = {line[0]: line[1:] for line in lines if len(line) == 3}
    for arm, value in stored["nll"].items():
        name = "hand-over" if arm == "handover" else arm
        assert rows[name] == [f"{value:.3f}", path.MEANING[arm]]
    pairs = {line[0]: line[1] for line in lines if len(line) == 2}
    for component, size in stored["moved_bytes"].items():
        assert pairs[component] == f"{size:,}"
    assert pairs["all"] == f"{sum(stored['moved_bytes'].values()):,}"
    assert f"{stored['speedup']:.1f} times sooner" in result.stdout
    assert "Prefix tokens the receiver read: 0" in result.stdout
    assert {"handover", "reread", "source_prefill", "save", "load"} < set(stored["seconds"])


def test_steps_are_told_on_stderr_and_files_are_named(shown: tuple[Result, Path]) -> None:
    result, out = shown
    for step in ("Loading source", "The source reads 96 tokens", "The bridge translates it (plan DDD)"):
        assert step in result.stderr
        assert step not in result.stdout
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "demo.png (the picture) and" in result.stdout


def test_generated_text_is_no_markup(shown: tuple[Result, Path]) -> None:
    """Random bytes of a random model hold brackets, which must come out as they are."""
    from statebridge.cli.demo import _print
    from statebridge.evaluate.demo import DemoResult

    _, out = shown
    stored = json.loads((out / "demo.json").read_text())
    stored.pop("speedup")
    texts = dict.fromkeys(stored["continuations"], "one [bold]two[/bold] [/red] three")
    app = typer.Typer()
    app.command()(lambda: _print(DemoResult(**stored | {"continuations": texts})))
    printed = CliRunner().invoke(app, [], env={"COLUMNS": "120"})
    assert printed.exit_code == 0, printed.exception
    assert printed.stdout.count("one [bold]two[/bold] [/red] three") == len(texts)


def test_where_the_pair_is_looked_for(
    pair_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(statebridge, "__file__", str(tmp_path / "checkout" / "statebridge" / "__init__.py"))
    with pytest.raises(ConfigError, match=r"checkpoints holds no trained pair .*--checkpoints"):
        find_checkpoints(None)
    half = tmp_path / "half"
    for name in ("source", "receiver"):
        (half / name).mkdir(parents=True)
        (half / name / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="bridge/ missing"):
        find_checkpoints(half)
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "checkpoints").symlink_to(pair_folder)
    assert find_checkpoints(None) == tmp_path / "checkout" / "checkpoints"
    (tmp_path / "checkpoints").symlink_to(pair_folder)
    assert find_checkpoints(None) == Path("checkpoints")
    assert find_checkpoints(pair_folder) == pair_folder
