"""The demo on a tiny pair: every step happens, and its picture is a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_pair
import torch

from statebridge.bridge import Bridge
from statebridge.calibrate import Calibrator
from statebridge.evaluate.arms import Protocol
from statebridge.evaluate.demo import MEANING, run_demo
from statebridge.evaluate.demo_plot import save_demo_plot


@pytest.fixture(scope="module")
def result():
    pair = tiny_pair.pair()
    bridge = Bridge.direct(pair.source_identity, pair.receiver_identity)
    return run_demo(pair, bridge, Protocol(96, 8), continuation_tokens=5)


def test_whole_path(result) -> None:
    assert result.prefix_tokens_processed == 0
    assert set(result.nll) == set(result.nll_by_position) == set(result.continuations) == set(MEANING)
    assert len(set(result.nll.values())) == len(MEANING)
    parts = ("capture", "translate", "first_token")
    assert result.seconds["handover"] == pytest.approx(sum(result.seconds[p] for p in parts))
    assert result.file_bytes > sum(result.moved_bytes.values()) > 0
    assert result.moved_bytes["K"] == 96 * 2 * 2 * 16 * 4  # tokens x heads x (keys, values) x dim x float32


def test_picture(result, tmp_path: Path) -> None:
    save_demo_plot(result, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_hand_over_that_is_judged_is_the_calibrated_one(result) -> None:
    pair = tiny_pair.pair()
    calibrator = Calibrator.identity(pair.receiver_identity.layers, 2)
    with torch.no_grad():
        for parameter in calibrator.parameters():
            parameter.fill_(0.3)
    bridge = Bridge.direct(pair.source_identity, pair.receiver_identity).with_calibrator(calibrator)
    found = run_demo(pair, bridge, Protocol(96, 8), continuation_tokens=5)
    assert found.plan == "DDD, calibrated"
    assert found.nll["native"] == pytest.approx(result.nll["native"])
    assert abs(found.nll["handover"] - result.nll["handover"]) > 1e-3
