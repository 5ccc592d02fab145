"""`statebridge sessions`: each command, in both forms of output, and what it must not do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent.parent / "sessions"))

from toy import Toy, digest

from statebridge.cli.app import app
from statebridge.errors import StoreError
from statebridge.sessions import SessionStore

RUNNER = CliRunner()


def run(*arguments: str, code: int = 0, given: str = "") -> str:
    result = RUNNER.invoke(app, ["sessions", *arguments], input=given)
    if isinstance(result.exception, StoreError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture
def store(tmp_path, monkeypatch) -> SessionStore:
    monkeypatch.setenv("STATEBRIDGE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("COLUMNS", "200")
    return SessionStore(tmp_path / "store", segment=4)


@pytest.fixture
def ids(store) -> list[str]:
    toy = Toy().step(9)
    first = store.checkpoint(toy, label="[bold]nine[/bold] steps")
    return [first, store.checkpoint(toy.step(3), parent=first)]


def test_list_and_show(store, ids) -> None:
    text = run("ls")
    assert ids[0][:12] in text
    assert "[bold]nine[/bold] steps" in text  # a label is text, no markup
    listed = json.loads(run("ls", "--format", "json"))["checkpoints"]
    assert [(c["id"], c["parent"]) for c in listed] == [(ids[0], None), (ids[1], ids[0])]
    assert "layer.0.cache" in run("show", ids[1][:6])
    assert "[2, 12+, 3]" in run("show", ids[1][:6])
    shown = json.loads(run("show", ids[1], "--format", "json"))
    assert shown["lineage"] == ids[::-1]
    assert {b["name"]: b["chunks"] for b in shown["buffers"]}["layer.0.cache"] == 3


def test_fork(store, ids) -> None:
    run("fork", ids[0], "--dry-run")
    assert len(store.list()) == 2
    child = run("fork", ids[0], "--label", "other").strip()
    assert digest(store.restore(child)) == digest(store.restore(ids[0]))
    assert [c.label for c in store.list() if c.parent == ids[0]] == ["", "other"]


def test_deleting_asks(store, ids) -> None:
    assert "would delete" in run("rm", ids[0], "--dry-run")
    run("rm", ids[0], code=1, given="n\n")
    run("gc", code=1, given="n\n")
    assert len(store.list()) == 2
    answered = run("rm", ids[0], "--format", "json", given="y\n")
    assert json.loads(answered[answered.index("{") :])["deleted"] == [ids[0]]  # the runner echoes the answer
    planned = json.loads(run("gc", "--dry-run", "--format", "json"))
    assert planned == json.loads(run("gc", "--yes", "--format", "json")) | {"dry_run": True}
    assert planned["blobs"] == 2
    assert [c.id for c in store.list()] == [ids[1]]
    store.restore(ids[1])


def test_verify_fails_on_damage(store, ids) -> None:
    assert "sound" in run("verify")
    blob = max((store.path / "blobs").iterdir())
    blob.write_bytes(bytes(blob.stat().st_size))
    assert blob.name[:12] in run("verify", code=1)
    assert json.loads(run("verify", "--format", "json", code=1))["problems"]
    manifest = store.path / "checkpoints" / ids[0]
    manifest.write_bytes(manifest.read_bytes()[1:])
    run("rm", ids[0], "--yes")  # what cannot be listed can be deleted
    assert store.identifiers() == (ids[1],)


def test_export_and_import(store, ids, tmp_path) -> None:
    archive, other = str(tmp_path / "one.tar"), str(tmp_path / "other")
    run("export", ids[1], archive)
    assert run("import", archive, "--store", other).strip() == ids[1]
    assert digest(SessionStore(other).restore(ids[1])) == digest(store.restore(ids[1]))


def test_mistakes_are_one_sentence(store, ids, tmp_path) -> None:
    with pytest.raises(StoreError, match="beginning of 0"):
        run("show", "beef")
    with pytest.raises(StoreError, match="at least four"):
        run("show", ids[0][:3])
    with pytest.raises(StoreError, match="no session store"):
        run("ls", "--store", str(tmp_path / "absent"))
    assert not (tmp_path / "absent").exists()
