"""The folder of a bridge: round trip, damage, forgery, later versions, interrupted saves, the hub."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_pair
import torch
from safetensors.torch import load_file, save_file

import statebridge
from statebridge.bridge import Bridge, artefact
from statebridge.errors import StateFileError

Edit = Callable[[dict[str, Any], dict[str, torch.Tensor]], None]


def rewrite(folder: Path, edit: Edit) -> None:
    """Edit config and tensors and sign them again, as someone who knows the format would."""
    path, weights = folder / "config.json", folder / "model.safetensors"
    content, tensors = json.loads(path.read_text()), {k: t.clone() for k, t in load_file(weights).items()}
    edit(content, tensors)
    save_file(tensors, weights)
    content.pop("digest", None)
    sha = json.dumps(content, sort_keys=True) + hashlib.sha256(weights.read_bytes()).hexdigest()
    path.write_text(json.dumps(content | {"digest": hashlib.sha256(sha.encode()).hexdigest()}))


@pytest.fixture
def folder(fitted: Bridge, tmp_path: Path) -> Path:
    """A saved bridge."""
    fitted.save_pretrained(tmp_path / "bridge")
    return tmp_path / "bridge"


def test_round_trip_is_bit_exact(fitted: Bridge, folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    loaded = Bridge.from_pretrained(folder)
    assert loaded.config == fitted.config
    state = statebridge.prefill(tiny_pair.pair().source, tiny_pair.ids_of()).state()
    for ours, theirs in zip(fitted(state).layers, loaded(state).layers, strict=True):
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours.tensors(), theirs.tensors(), strict=True))
    again = folder.with_name("again")
    loaded.save_pretrained(again)
    for name in ("config.json", "model.safetensors", "README.md"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_a_direct_bridge_has_no_tensors(tmp_path: Path) -> None:
    pair = tiny_pair.pair()
    Bridge.direct(pair.source_identity, pair.receiver_identity).save_pretrained(tmp_path)
    loaded = Bridge.from_pretrained(tmp_path)
    assert loaded.config.plan == "DDD"
    assert loaded.translators == {}


def test_the_card_says_what_the_bridge_is(folder: Path) -> None:
    card = (folder / "README.md").read_text()
    assert "Plan **TTT**" in card
    assert "Fitted on 10 documents, regularisation chosen on 4, prefixes of 16, 32 tokens, seed 0." in card
    rows = [line for line in card.splitlines() if line.startswith(("| keys", "| values", "| R", "| C"))]
    assert len(rows) == 4


def test_damage_is_refused(fitted: Bridge, folder: Path) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    good, text = weights.read_bytes(), config.read_text()
    for bad in (b"", good[:100], good[:-1], good + b"\0", good[:-7] + b"\1" + good[-6:]):
        weights.write_bytes(bad)
        with pytest.raises(StateFileError, match="does not match its digest"):
            Bridge.from_pretrained(folder)
    weights.unlink()
    with pytest.raises(StateFileError, match="does not match its digest"):
        Bridge.from_pretrained(folder)
    weights.write_bytes(good)
    for old, new in (('"plan": "TTT"', '"plan": "DDD"'), (fitted.config.source.weights, "0" * 64)):
        config.write_text(text.replace(old, new))
        with pytest.raises(StateFileError, match="does not match its digest"):
            Bridge.from_pretrained(folder)
    for bad_text in ("", "[]", "{", "nul", '"x"', "{}", '{"format": 1}', "[" * 100_000):
        config.write_text(bad_text)
        with pytest.raises(StateFileError, match="is not a bridge folder"):
            Bridge.from_pretrained(folder)
    config.write_text(text)
    assert Bridge.from_pretrained(folder).config == fitted.config


def set_key(name: str, value: Any) -> Edit:
    return lambda content, tensors: content.update({name: value})


def add_tensor(name: str, value: torch.Tensor | None = None) -> Edit:
    return lambda content, tensors: tensors.update({name: torch.zeros(2) if value is None else value})


def spoil(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda content, tensors: tensors.update({name: change(tensors[name])})


FORGERIES: dict[str, tuple[Edit, str]] = {
    "another kind": (set_key("format", "peft"), "holds 'peft'"),
    "newer": (set_key("format_version", 99), "version 99, this library reads .* up to 1; upgrade"),
    "other maps": (set_key("maps", {"key": "Mlp"}), "malformed"),
    "no such plan": (set_key("plan", "QQQ"), "malformed"),
    "no source": (lambda content, tensors: content.pop("source"), "malformed"),
    "layers no list": (lambda content, tensors: content["source"].update(layers=3), "malformed"),
    "fit no mapping": (set_key("fit", 3), "malformed"),
    "rope": (lambda content, tensors: content["source"]["rope"].update(inv_freq=["x"]), "malformed"),
    "path": (add_tensor("../../etc/passwd"), "unexpected tensor"),
    "layer": (add_tensor("layers.77.key.weight"), "unexpected tensor"),
    "negative": (add_tensor("layers.-1.key.weight"), "unexpected tensor"),
    "field": (add_tensor("layers.0.__class__.weight"), "unexpected tensor"),
    "map for nothing": (
        lambda content, tensors: tensors.update(
            {f"layers.0.key.{part}": tensors[f"layers.3.key.{part}"].clone() for part in ("weight", "bias")}
        ),
        "a map for nothing",
    ),
    "missing part": (lambda content, tensors: tensors.pop("layers.3.key.bias"), "lack 'bias'"),
    "missing map": (
        lambda content, tensors: [tensors.pop(f"layers.3.key.{p}") for p in ("weight", "bias")],
        "missing",
    ),
    "NaN": (spoil("layers.3.value.weight", lambda t: t * float("nan")), "NaN or infinity"),
    "infinity": (spoil("layers.0.recurrent_state.left", lambda t: t / 0), "NaN or infinity"),
    "dtype": (spoil("layers.3.key.weight", lambda t: t.long()), "malformed"),
    "heads": (spoil("layers.3.key.weight", lambda t: t[:1].clone()), "malformed"),
    "huge blocks": (spoil("layers.0.conv_state.blocks", lambda t: torch.tensor([[0, 10**12]])), "malformed"),
    "overlapping blocks": (spoil("layers.0.conv_state.blocks", lambda t: t * 0), "malformed"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forgeries_are_refused(folder: Path, name: str) -> None:
    edit, message = FORGERIES[name]
    rewrite(folder, edit)
    with pytest.raises(StateFileError, match=message):
        Bridge.from_pretrained(folder)


def test_unknown_keys_of_a_later_version_are_ignored_with_a_warning(fitted: Bridge, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Bridge.from_pretrained(folder)
    rewrite(folder, set_key("calibrator", {"rank": 4}))
    with pytest.warns(UserWarning, match="later version of statebridge; ignoring calibrator"):
        assert Bridge.from_pretrained(folder).config == fitted.config


@pytest.mark.parametrize("kill_at", range(4))
def test_a_killed_save_never_mixes(
    fitted: Bridge, folder: Path, monkeypatch: pytest.MonkeyPatch, kill_at: int
) -> None:
    """Stop at every rename: what is there afterwards is the old bridge, the new one, or refused."""
    new = Bridge(dataclasses.replace(fitted.config, plan="DDD", fit={}), {})
    replace, renames = Path.replace, []

    def counted(self: Path, target: Path) -> Path:
        if len(renames) == kill_at:
            raise KeyboardInterrupt
        renames.append(Path(target).name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", counted)
    if kill_at < 3:
        with pytest.raises(KeyboardInterrupt):
            new.save_pretrained(folder)
    else:
        new.save_pretrained(folder)
        assert renames[-1] == "config.json"  # it vouches for the rest
    monkeypatch.undo()
    if kill_at in (0, 3):
        assert Bridge.from_pretrained(folder).config == (fitted if kill_at == 0 else new).config
    else:
        with pytest.raises(
            StateFileError, match="does not match its digest: it was edited, damaged or saved half"
        ):
            Bridge.from_pretrained(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_a_card_stays_with_its_bridge_only(fitted: Bridge, folder: Path) -> None:
    (folder / "README.md").write_text("scores by hand")
    fitted.save_pretrained(folder)
    assert (folder / "README.md").read_text() == "scores by hand"
    fitted.with_plan("DDD").save_pretrained(folder)
    assert "Plan **DDD**" in (folder / "README.md").read_text()


def test_folders_that_cannot_be_written(
    fitted: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateFileError, match="cannot be made"):
        fitted.save_pretrained(tmp_path / "file")

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artefact, "save_file", full)
    with pytest.raises(StateFileError, match="No space left"):
        fitted.save_pretrained(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []


def test_push_and_fetch(fitted: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = tmp_path / "hub"

    class Api:
        def __init__(self, token: str | None = None) -> None:
            self.token = token

        def create_repo(self, repo_id: str, **_: Any) -> Any:
            return type("repo", (), {"repo_id": repo_id})

        def upload_folder(self, repo_id: str, folder_path: Path, **_: Any) -> str:
            shutil.copytree(folder_path, pushed / repo_id)
            return f"https://hub/{repo_id}"

    monkeypatch.setattr("huggingface_hub.hub_mixin.HfApi", Api)
    assert fitted.push_to_hub("me/bridge") == "https://hub/me/bridge"
    assert (
        fitted.save_pretrained(tmp_path / "local", push_to_hub=True, repo_id="me/second")
        == "https://hub/me/second"
    )
    asked: dict[str, Any] = {}

    def snapshot(name: str, **options: Any) -> str:
        asked.update(options)
        return str(pushed / name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for name in ("me/bridge", "me/second"):
        assert Bridge.from_pretrained(name, revision="v1").config == fitted.config
    assert asked["revision"] == "v1"
    assert asked["allow_patterns"] == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", ["no/such/folder/here", "nobody/nothing", "/absent", ""])
def test_absent_bridges(name: str) -> None:
    with pytest.raises(StateFileError, match=r"bridge folder|cannot be fetched"):
        Bridge.from_pretrained(name, local_files_only=True)
