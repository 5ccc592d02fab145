"""The path of training passes is chosen once: installed kernels where their backward works, else the reference."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_calibrate
import tiny_pair
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from statebridge.bridge import calibrate_documents
from statebridge.bridge.backward import choose_backward, reference_kernels
from statebridge.capture import continue_from, prefill
from statebridge.errors import FitError

IDS = torch.arange(3, 15)[None]


class _Refuse(torch.autograd.Function):
    """The forward pass is fine, the backward pass raises, as fla's does on some GPUs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("chunk_bwd_dqkwg is wrong on this GPU")


class _Zero(_Refuse):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("nan")


def kernel(reference: Callable[..., Any], fault: type[torch.autograd.Function], calls: list[int]) -> Any:
    @functools.wraps(reference)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        output, last = reference(*args, **kwargs)
        return fault.apply(output), last

    return stand_in


@pytest.fixture
def reference() -> Callable[..., Any]:
    return inspect.unwrap(modeling.torch_chunk_gated_delta_rule)  # type: ignore[no-any-return]


def test_what_works_is_left_alone() -> None:
    before = modeling.torch_chunk_gated_delta_rule
    path = choose_backward(tiny_pair.pair().receiver, IDS)
    assert path.name == "installed"
    with path.over(tiny_pair.pair().receiver):
        assert modeling.torch_chunk_gated_delta_rule is before


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(_Refuse, "RuntimeError: chunk_bwd_dqkwg is wrong"), (_Zero, "layer 0 .* has a non-finite gradient")],
)
def test_a_kernel_without_a_backward_pass_gives_way_to_the_reference(
    fault: type[torch.autograd.Function],
    reason: str,
    reference: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls: list[int] = []
    broken = kernel(reference, fault, calls)
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", broken)
    with caplog.at_level(logging.INFO, "statebridge.bridge.backward"):
        path = choose_backward(tiny_pair.pair().receiver, IDS)
    assert path.name == "reference"
    assert "reference functions" in caplog.text
    assert re.search(reason, path.reason)
    assert calls
    calls.clear()
    with path.over(tiny_pair.pair().receiver):
        assert modeling.torch_chunk_gated_delta_rule is reference
        prefill(tiny_pair.pair().receiver, IDS)
    assert not calls
    assert modeling.torch_chunk_gated_delta_rule is broken


def test_training_runs_on_the_reference_and_says_so(
    reference: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", kernel(reference, _Refuse, calls))
    stages: list[str] = []
    bridge = test_calibrate.fit(progress=lambda stage, done, total: stages.append(stage), max_steps=2)
    assert bridge.config.calibration["backward"]["name"] == "reference"
    assert "chunk_bwd_dqkwg" in bridge.config.calibration["backward"]["reason"]
    assert "training passes use the reference functions" in stages
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", reference)
    plain = test_calibrate.fit(max_steps=2)
    # this stand-in computes what the reference does, so both paths end at the same bits
    assert all(
        torch.equal(x, test_calibrate.tensors(plain)[n]) for n, x in test_calibrate.tensors(bridge).items()
    )


def test_functions_come_back_after_an_error() -> None:
    before = modeling.torch_chunk_gated_delta_rule
    inside = None
    try:
        with reference_kernels(tiny_pair.pair().receiver):
            inside = modeling.torch_chunk_gated_delta_rule
            raise KeyError
    except KeyError:
        assert inside is not before
    assert modeling.torch_chunk_gated_delta_rule is before


def test_a_receiver_without_any_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = tiny_pair.pair().receiver

    def cut(*args: Any, **kwargs: Any) -> Any:
        live = continue_from(*args, **kwargs)
        live.logits = live.logits.detach()
        return live

    monkeypatch.setattr("statebridge.bridge.backward.continue_from", cut)
    with pytest.raises(FitError, match="No gradient passes through this receiver"):
        choose_backward(receiver, IDS)


@pytest.mark.parametrize("states", ["device", "recompute"])
def test_the_source_reads_on_the_kernels_of_the_preparation(
    states: str, reference: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The receiver's training passes run on the torch functions, the source's all the same on its kernels."""
    calls: list[int] = []
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", kernel(reference, _Refuse, calls))
    on_kernels: list[bool] = []

    def watched(model: Any, ids: torch.Tensor, **options: Any) -> Any:
        before, live = len(calls), prefill(model, ids, **options)
        if model is tiny_pair.pair().source:
            on_kernels.append(len(calls) > before)
        return live

    def stop(name: str, done: int, total: int) -> None:
        if (name, done) == ("calibrate", 1):
            raise KeyboardInterrupt

    monkeypatch.setattr(calibrate_documents, "prefill", watched)
    with pytest.raises(KeyboardInterrupt):
        test_calibrate.fit(tmp_path, stop, states=states, max_steps=2)
    on_kernels.clear()
    bridge = test_calibrate.fit(tmp_path, states=states, max_steps=2)
    assert bridge.config.calibration["backward"]["name"] == "reference"
    assert set(on_kernels) == {True}
