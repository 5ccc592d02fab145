"""The restore control can fail: each fault it looks for is planted, and its verdict turns."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import tiny
import torch

from statebridge.capture import model as model_module
from statebridge.capture import prefill
from statebridge.errors import ConfigError, StatebridgeError
from statebridge.evaluate import restore_control as control_module
from statebridge.evaluate.restore_control import NEXT_TOKENS, restore_control
from statebridge.state import HybridState
from statebridge.state import file as file_module

# by name, because the function `capture` hides the module of that name
capture_module = importlib.import_module("statebridge.capture.capture")
LENGTHS = (24, 33)


def control(family: str = "qwen3_5"):
    return restore_control(tiny.build(family), tiny.ids(2, LENGTHS[-1] + NEXT_TOKENS, seed=1), LENGTHS)


def failed(family: str = "qwen3_5") -> set[str]:
    return {check.name for check in control(family).checks if not check.passed}


@pytest.mark.parametrize("family", tiny.available())
def test_every_family_passes_with_difference_zero(family: str) -> None:
    model = tiny.build(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = control(family)
    assert report.passed, report.checks
    assert [(row.top1, row.max_difference) for row in report.lengths] == [(1.0, 0.0)] * 2
    # the checks that change weights have put them back
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def installed(monkeypatch, change, after=lambda held, layer: None) -> None:
    """Plant a fault in what restore installs."""
    real = capture_module.install_layer

    def install(cache, index, layer, *rest):
        real(cache, index, change(layer), *rest)
        after(cache.layers[index], layer)

    monkeypatch.setattr(capture_module, "install_layer", install)


def changed(field: str, function):
    return lambda layer: layer.map(lambda name, t: function(t) if name == field else t)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (changed("recurrent_state", lambda t: t.bfloat16()), {"restore", "dtypes"}),
        (changed("conv_state", lambda t: t.roll(1, -1)), {"restore"}),
        (changed("recurrent_state", lambda t: t.roll(1, 1)), {"restore"}),
        (changed("key", lambda t: t.roll(1, 1)), {"restore"}),
        (lambda layer: layer.without(frozenset({"C"})), {"restore"}),
    ],
    ids=["R in bfloat16", "C shifted", "R heads swapped", "key heads swapped", "C dropped"],
)
def test_faults_of_restore(monkeypatch, change, expected: set[str]) -> None:
    installed(monkeypatch, change)
    assert expected <= failed()


def test_a_flag_left_off(monkeypatch) -> None:
    def forget(held, layer):
        if layer.recurrent_state is not None:
            held.has_previous_state[0] = False

    installed(monkeypatch, lambda layer: layer, forget)
    assert {"restore", "dtypes"} <= failed()


def test_a_restore_that_shares_memory(monkeypatch) -> None:
    def share(held, layer):
        if layer.recurrent_state is not None:
            held.recurrent_states[0] = layer.recurrent_state

    installed(monkeypatch, lambda layer: layer, share)
    assert "forks" in failed()


def test_a_capture_that_shares_memory(monkeypatch) -> None:
    real = capture_module.read_cache

    def read(cache, specs):
        return tuple(
            dataclasses.replace(layer, recurrent_state=held.recurrent_states[0])
            if layer.recurrent_state is not None
            else layer
            for layer, held in zip(real(cache, specs), cache.layers, strict=True)
        )

    monkeypatch.setattr(capture_module, "read_cache", read)
    assert {"restore", "forks"} <= failed()


def test_a_save_that_corrupts(monkeypatch) -> None:
    real = file_module.save_file

    def corrupt(tensors, path, metadata):
        real(tensors | {"layers.0.conv_state": tensors["layers.0.conv_state"] + 1}, path, metadata)

    monkeypatch.setattr(file_module, "save_file", corrupt)
    assert failed() == {"file"}


def test_a_save_that_rounds(monkeypatch) -> None:
    """Consistently, so that the digest fits."""
    real = file_module.save_state

    def rounded(state, path):
        real(state.map(lambda f, t: t.bfloat16().float() if f == "recurrent_state" else t), path)

    monkeypatch.setattr(file_module, "save_state", rounded)
    assert failed() == {"file"}


def test_an_identity_that_sees_no_weights(monkeypatch) -> None:
    monkeypatch.setattr(model_module, "_weights_digest", lambda model: "0")
    monkeypatch.setattr(model_module, "_fingerprint", lambda model: None)
    assert failed() == {"other weights"}


def test_an_identity_that_sees_no_rotation(monkeypatch) -> None:
    fixed = model_module.profile(tiny.build("qwen3_5")).identity.rope
    monkeypatch.setattr(model_module, "_rope", lambda model, config: fixed)
    assert failed() == {"other rotation"}


def test_a_partial_state_that_passes_for_whole(monkeypatch) -> None:
    monkeypatch.setattr(HybridState, "missing", frozenset())
    assert failed() == {"partial"}


def test_a_continuation_that_reads_the_prefix_again(monkeypatch) -> None:
    def again(model, state, after):
        return prefill(model, torch.cat((state.bookkeeping.token_ids, after), dim=1))

    monkeypatch.setattr(control_module, "continue_from", again)
    assert "counter" in failed()


def test_a_refusal_of_what_is_right(monkeypatch) -> None:
    def refuse(self):
        raise StatebridgeError("no")

    monkeypatch.setattr(HybridState, "save", lambda self, path: refuse(self))
    assert failed() == {"file"}


def test_contexts_must_be_long_enough() -> None:
    with pytest.raises(ConfigError, match="too short"):
        restore_control(tiny.build("llama"), tiny.ids(1, 20), (16,))
