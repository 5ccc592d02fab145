"""Models on the host beside a GPU run on the torch functions, because the kernels that transformers chose cannot."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tiny
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

import statebridge
from statebridge.capture.kernels import runnable_kernels
from statebridge.evaluate.restore_control import restore_control
from statebridge.sessions.fingerprint.language import CacheRuntime

NAMES = [name for name in vars(modeling) if "delta_rule" in name and callable(getattr(modeling, name))]


@pytest.fixture
def gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where fla is installed and a GPU is there: every delta rule is a kernel that takes no host tensors."""
    for name in NAMES:

        def kernel(*args: Any, **kwargs: Any) -> Any:
            raise ValueError("cannot be accessed from Triton (cpu tensor?)")

        monkeypatch.setattr(modeling, name, functools.update_wrapper(kernel, getattr(modeling, name)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_model_on_the_host_runs_beside_a_gpu(gpu_kernels: None) -> None:
    model = tiny.build("qwen3_5", seed=3)
    state = statebridge.prefill(model, tiny.ids(1, 9)).state()
    statebridge.continue_from(model, state, tiny.ids(1, 2))
    statebridge.generate_from(model, state, tiny.ids(1, 1), max_new_tokens=2, do_sample=False)
    assert restore_control(model, tiny.ids(1, 20), (8,)).passed
    CacheRuntime(model).read(tiny.ids(1, 9))
    with pytest.raises(ValueError, match="Triton"):
        model(input_ids=tiny.ids(1, 9))  # the functions are put back


def test_elsewhere_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = {name: getattr(modeling, name) for name in NAMES}
    with runnable_kernels(tiny.build("qwen3_5", seed=3)):
        assert {name: getattr(modeling, name) for name in NAMES} == before


def test_blocks_that_overlap_in_threads_end_with_the_last(gpu_kernels: None) -> None:
    """One thread leaves while another is inside, which still runs; then the kernels are back."""
    model = tiny.build("qwen3_5", seed=3)
    kernels = {name: getattr(modeling, name) for name in NAMES}
    first, second = runnable_kernels(model), runnable_kernels(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    model(input_ids=tiny.ids(1, 9))
    second.__exit__(None, None, None)
    assert {name: getattr(modeling, name) for name in NAMES} == kernels
