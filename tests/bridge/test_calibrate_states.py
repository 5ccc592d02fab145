"""Where states are kept while a calibrator is trained changes no bit of it, and nothing changes a kept state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_pair
import torch
from test_calibrate import fit, tensors, trainer

from statebridge.bridge import Bridge
from statebridge.bridge import calibrate_documents as preparation
from statebridge.calibrate import Calibrator
from statebridge.capture import prefill
from statebridge.errors import FitError


def report(bridge: Bridge) -> dict[str, Any]:
    """What the training found, without the setting that says where states were."""
    found = {**bridge.config.calibration, "settings": {**bridge.config.calibration["settings"]}}
    del found["settings"]["states"]
    return found


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_wherever_states_are_kept_they_train_alike(micro_batch: int, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 2, "micro_batch": micro_batch, "components": ("R", "C")}
    kept = fit(tmp_path / "disk", **settings)
    others = {"device": fit(tmp_path / "device", states="device", **settings)}
    if micro_batch == 1:  # else a step's documents are read together, which changes rounding
        others["recompute"] = fit(tmp_path / "recompute", states="recompute", **settings)
    for again in others.values():
        assert all(torch.equal(x, tensors(again)[name]) for name, x in tensors(kept).items())  # bit-exact
        assert report(again) == report(kept)
    for where, count in {"disk": 7, **dict.fromkeys(others, 0)}.items():
        folder = tmp_path / where / "calibration" / "documents"
        assert len(list(folder.glob("*.state.safetensors"))) == count
        assert len(list(folder.glob("*.native.safetensors"))) == 7


def test_a_run_goes_on_with_its_states_elsewhere(tmp_path: Path) -> None:
    """What does not fit into one place can be kept in another, in the same folder."""
    settings: dict[str, Any] = {"max_steps": 4, "evaluate_every": 1}

    def stop(name: str, done: int, total: int) -> None:
        if (name, done) == ("calibrate", 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, stop, states="device", **settings)
    again = fit(tmp_path, states="disk", **settings)
    assert report(again) == report(fit(**settings))


def test_the_source_reads_each_document_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """States on the device are read in the preparation, and never again."""
    read: list[int] = []

    def counted(model: Any, ids: torch.Tensor, **options: Any) -> Any:
        if model is tiny_pair.pair().source:
            read.append(len(ids))
        return prefill(model, ids, **options)

    monkeypatch.setattr(preparation, "prefill", counted)
    fit(states="device", max_steps=2)
    assert sum(read) == 7


@pytest.mark.parametrize("micro_batch", [1, 2])
def test_training_leaves_held_states_as_they_are(micro_batch: int, tmp_path: Path) -> None:
    made = trainer(tmp_path, states="device", micro_batch=micro_batch, components=("R", "C"))
    held = made.documents._held
    before = {key: state.clone() for key, state in held.items()}
    assert len(before) == 7
    made.run(lambda *_: None)
    made.validation_kl(Calibrator({}))
    assert held.keys() == before.keys()
    for key, state in held.items():
        assert state.batch_size == 1
        for layer, was in zip(state.layers, before[key].layers, strict=True):
            assert all(
                torch.equal(x, y) for (_, x), (_, y) in zip(layer.tensors(), was.tensors(), strict=True)
            )
            # nothing hangs on an autograd graph that would keep a pass in memory
            assert not any(x.requires_grad for _, x in layer.tensors())
    made.receiver.zero_grad()  # `fit_calibrator` freezes it, a trainer by itself does not


def test_one_held_document_is_given_without_a_copy(tmp_path: Path) -> None:
    documents = trainer(tmp_path, states="device").documents
    held = documents._held["fit", 2]
    given = documents.batch("fit", [2]).base
    for one, other in zip(given.layers, held.layers, strict=True):
        for (_, x), (_, y) in zip(one.tensors(), other.tensors(), strict=True):
            assert x.data_ptr() == y.data_ptr()


def test_a_full_device_is_seen_before_a_state_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = trainer(tmp_path / "one", states="device").documents._held["fit", 0]
    needed = 7 * sum(state.nbytes().values())
    monkeypatch.setattr(preparation, "_free_bytes", lambda _: needed - 1)
    with pytest.raises(
        FitError, match=r'7 states of .* MB each, .* do not fit .* free; .* "disk" or "recompute"'
    ):
        fit(tmp_path / "two", states="device", max_steps=1)
    assert not list(tmp_path.glob("two/**/*.safetensors"))
    monkeypatch.setattr(preparation, "_free_bytes", lambda _: needed)
    assert fit(tmp_path / "two", states="device", max_steps=1).calibrator is not None


def test_what_torch_holds_of_a_gpu_and_does_not_use_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("mem_get_info", (50, 1000)), ("memory_reserved", 300), ("memory_allocated", 100)):
        monkeypatch.setattr(torch.cuda, name, lambda _, value=value: value)
    assert preparation._free_bytes(torch.device("cuda:0")) == 50 + 200
    assert preparation._free_bytes(torch.device("cpu")) == float("inf")
