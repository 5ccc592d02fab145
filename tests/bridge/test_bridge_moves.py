"""How a bridge moves many layers at once: the same as part by part, and with few tensor operations."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_pair
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import statebridge
from statebridge.bridge import Bridge
from statebridge.bridge.apply import Moves
from statebridge.calibrate import Calibrator
from statebridge.capture import restore
from statebridge.state import HybridState, LayerState

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.full_size_proof.maps import random_maps

PLANS = ("DDD", "TTT", "TDT", "0-1:TTT,2-3:DTD")
LAYERS = 32
GRAIN = 32768  # elements from which torch shares an operation out among threads


@pytest.fixture(scope="module")
def calibrator() -> Calibrator:
    made = Calibrator.identity(tiny_pair.pair().receiver_identity.layers, rank=2)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def padded_state() -> HybridState:
    ids, mask = tiny.ids(2, 21), torch.ones(2, 21, dtype=torch.int64)
    mask[1, :6] = 0
    return statebridge.prefill(tiny_pair.pair().source, ids, mask).state()


def moved_naively(
    bridge: Bridge, state: HybridState, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    fast = bridge(state)
    with monkeypatch.context() as patch:
        patch.setattr(Moves, "__call__", Moves.naive)
        naive = bridge(state)
    return named(fast), named(naive)


def named(state: HybridState) -> dict[str, torch.Tensor]:
    return {f"{i}.{name}": t for i, layer in enumerate(state.layers) for name, t in layer.tensors()}


@pytest.mark.parametrize("calibrated", [False, True], ids=["plain", "calibrated"])
@pytest.mark.parametrize("plan", PLANS)
def test_layers_at_once_are_layers_one_by_one(
    plan: str, calibrated: bool, fitted: Bridge, calibrator: Calibrator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To float32 rounding where products are batched; copies to the last bit."""
    bridge = fitted.with_plan(plan)
    bridge = bridge.with_calibrator(calibrator) if calibrated else bridge
    fast, naive = moved_naively(bridge, padded_state(), monkeypatch)
    assert fast.keys() == naive.keys()
    for name, tensor in naive.items():
        assert fast[name].dtype == tensor.dtype
        assert fast[name].is_contiguous()
        if calibrated or plan != "DDD":
            torch.testing.assert_close(fast[name], tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: n + m)
        else:
            assert torch.equal(fast[name], tensor)


def test_large_parts_are_moved_by_themselves(fitted: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-exact: then every product is the naive one."""
    monkeypatch.setattr("statebridge.bridge.apply._SMALL", 0)
    fast, naive = moved_naively(fitted, padded_state(), monkeypatch)
    assert all(torch.equal(fast[name], naive[name]) for name in naive)


def test_a_calibrator_that_changes_is_not_remembered(fitted: Bridge, calibrator: Calibrator) -> None:
    bridge, state = fitted.with_calibrator(calibrator), padded_state()
    before = named(bridge(state))
    with torch.no_grad():
        for parameter in calibrator.parameters():
            parameter.mul_(2.0)
    try:
        after = named(bridge(state))
    finally:
        with torch.no_grad():
            for parameter in calibrator.parameters():
                parameter.mul_(0.5)
    for name in before:
        assert not torch.equal(before[name], after[name])


@pytest.mark.parametrize("plan", ["DDD", "TTT"])
def test_moved_layers_share_no_memory_with_the_source(
    plan: str, fitted: Bridge, calibrator: Calibrator
) -> None:
    state = padded_state()
    for bridge in (fitted.with_plan(plan), fitted.with_plan(plan).with_calibrator(calibrator)):
        kept = named(state.clone())
        for tensor in named(bridge(state)).values():
            tensor.fill_(7.0)
        assert all(torch.equal(tensor, kept[name]) for name, tensor in named(state).items())


class Operations(TorchDispatchMode):
    """Counts the tensor operations that compute or copy something; views cost no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        asks = name in ("promote_types", "is_nonzero", "detach", "lift_fresh", "equal")
        self.count += not (asks or getattr(function, "is_view", False))
        return result


def operations(function: Callable[[], object]) -> int:
    function()  # what is kept for the next time
    with Operations() as seen:
        function()
    return seen.count


@pytest.fixture(scope="module")
def deep() -> tuple[HybridState, dict[str, Bridge], Any]:
    """A state of 32 layers, bridges for it, and its model; every bridge leads back to the model itself."""
    model = tiny.build("qwen3_5", seed=3, num_hidden_layers=LAYERS)
    state = statebridge.prefill(model, tiny.ids(1, 9)).state()
    small = tiny.build("qwen3_5", seed=3)
    few = statebridge.ModelPair(small, small, tiny_pair.tokenizer())
    maps = random_maps(few)  # of one period of four layers
    identity = state.bookkeeping.model
    many = {(i, name): maps[i % 4, name] for i in range(LAYERS) for name in fields(state, i)}
    config = dataclasses.replace(Bridge.direct(identity, identity).config, plan="TTT")
    bridge = Bridge(config, many)
    calibrated = bridge.with_plan("TDD").with_calibrator(Calibrator.identity(identity.layers, rank=2))
    plans = {plan: bridge.with_plan(plan) for plan in ("DDD", "TDD", "TTT")}
    return state, plans | {"calibrated": calibrated}, model


def fields(state: HybridState, index: int) -> list[str]:
    return [name for name, _ in state.layers[index].tensors()]


@pytest.mark.parametrize(("plan", "most"), [("DDD", 85), ("TDD", 100), ("TTT", 70), ("calibrated", 100)])
def test_a_translation_takes_few_operations(plan: str, most: int, deep: Any) -> None:
    """64 parts: a copy each, or some dozens of operations for all of a component together."""
    state, bridges, _ = deep
    assert operations(lambda: bridges[plan](state)) <= most


def test_capture_and_install_copy_each_part_once(deep: Any) -> None:
    """64 copies, and a few operations on the bookkeeping."""
    state, _, model = deep
    live = statebridge.prefill(model, tiny.ids(1, 9))
    assert operations(live.state) <= 64 + 12
    assert operations(lambda: restore(state, model)) <= 64 + 12


class LongRows(TorchDispatchMode):
    """Names of operations that make something of integers or flags as long as torch's thread pool wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        held = {x.untyped_storage().data_ptr() for x in given}
        long = any(not x.is_floating_point() and x.numel() >= GRAIN for x in given + made)
        views = made and all(x.untyped_storage().data_ptr() in held for x in made)
        if long and not views and function.overloadpacket.__name__ != "lift_fresh":
            self.names.append(function.overloadpacket.__name__)
        return result


def test_the_bookkeeping_of_a_long_prefix_wakes_no_threads() -> None:
    """One such operation took 10 ms where other work kept the cores busy, four times a capture."""
    model = tiny.build("qwen3_5", seed=3)
    short = statebridge.prefill(model, tiny.ids(1, 8)).state()

    def longer(layer: LayerState) -> LayerState:
        return layer.map(lambda name, x: x.repeat(1, 1, GRAIN // 8, 1) if name in ("key", "value") else x)

    book = short.bookkeeping
    state = HybridState(
        tuple(longer(layer) for layer in short.layers),
        dataclasses.replace(
            book,
            token_ids=book.token_ids.repeat(1, GRAIN // 8),
            pad_mask=book.pad_mask.repeat(1, GRAIN // 8),
            positions=torch.arange(GRAIN)[None],
            next_position=torch.tensor([GRAIN]),
            schedule=(GRAIN,),
        ),
    )
    bridge = Bridge.direct(book.model, book.model)
    live = statebridge.continue_from(model, bridge(state), tiny.ids(1, 1))
    with LongRows() as seen:
        moved = bridge(live.state())
        restore(moved, model)
        statebridge.continue_from(model, moved, tiny.ids(1, 1))
    assert seen.names == []
