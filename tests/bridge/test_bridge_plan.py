"""Plans that differ from layer to layer, carried out by a bridge."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import tiny_pair
import torch

from statebridge.bridge import Bridge, FitConfig, fit_bridge
from statebridge.capture import prefill
from statebridge.config import parse_config
from statebridge.errors import ConfigError
from statebridge.select import Plan
from statebridge.state import HybridState


@pytest.fixture(scope="module")
def state() -> HybridState:
    return prefill(tiny_pair.pair().source, tiny_pair.ids_of()).state()


def test_each_layer_follows_its_own_choice(fitted: Bridge, state: HybridState) -> None:
    plan = Plan.parse("0:DTD,1:DDT,2:TTT,3:TDD")
    moved = fitted.with_plan(plan)(state)
    translated, copied = fitted.with_plan("TTT")(state), fitted.with_plan("DDD")(state)
    for index in range(4):
        for field, x in moved.layers[index].tensors():
            component = {"recurrent_state": "R", "conv_state": "C"}.get(field, "K")
            wanted = translated if plan.translates(index, component) else copied  # type: ignore[arg-type]
            assert torch.equal(x, getattr(wanted.layers[index], field)), (index, field)
            other = copied if wanted is translated else translated
            assert not torch.equal(x, getattr(other.layers[index], field)), (index, field)


def test_a_plan_by_layers_survives_the_folder(fitted: Bridge, state: HybridState, tmp_path: Path) -> None:
    bridge = fitted.with_plan("0-2:DTD,3:TDD")
    bridge.save_pretrained(tmp_path)
    again = Bridge.from_pretrained(tmp_path)
    assert again.plan == bridge.plan
    for one, other in zip(again(state).layers, bridge(state).layers, strict=True):
        assert all(torch.equal(x, y) for (_, x), (_, y) in zip(one.tensors(), other.tensors(), strict=True))


def test_keys_that_are_copied_everywhere_need_no_positions(fitted: Bridge, state: HybridState) -> None:
    blind = dataclasses.replace(state, bookkeeping=dataclasses.replace(state.bookkeeping, positions=None))
    fitted.with_plan("0-2:TTT,3:DDD")(blind)  # the attention layer is the last one


def test_plans_that_cannot_be_carried_out_are_refused(fitted: Bridge) -> None:
    with pytest.raises(ConfigError, match="lists 3 layers, the model has 4"):
        fitted.with_plan("0-2:TDD")
    with pytest.raises(ConfigError, match="'TXD' is no choice"):
        parse_config(FitConfig, {"plan": "TXD"})
    # before anything is read: there are no documents here to read
    with pytest.raises(ConfigError, match="lists 3 layers"):
        fit_bridge(tiny_pair.pair(), [], FitConfig(plan="0-2:TDD"))
