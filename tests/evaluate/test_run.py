"""The evaluation run: resumes, refuses other settings, and its verdicts follow from its scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny_pair

from statebridge.bridge import Bridge
from statebridge.errors import ConfigError
from statebridge.evaluate import run
from statebridge.evaluate.config import EvaluateConfig, GateConfig
from statebridge.evaluate.summary import summarise, verdict
from statebridge.stats import Interval

CONFIG = EvaluateConfig(
    count=7, prefix=60, targets=5, batch_size=3, plans=("DDD",), windows=(4,), resamples=200
)


@pytest.fixture(scope="module")
def bridge() -> Bridge:
    pair = tiny_pair.pair()
    return Bridge.direct(pair.source_identity, pair.receiver_identity)


def evaluate(bridge: Bridge, out: Path, config: EvaluateConfig = CONFIG):
    return run.evaluate(tiny_pair.pair(), bridge, config, out=out, documents=tiny_pair.documents(9, 200))


def test_folder_holds_everything(bridge: Bridge, tmp_path: Path) -> None:
    result = evaluate(bridge, tmp_path)
    table = pq.read_table(tmp_path / "scores.parquet")
    arms = ["native", "restore", "source", "empty", "window 4", "DDD", "kv only", "wrong donor"]
    assert list(dict.fromkeys(table["arm"].to_pylist())) == arms
    assert table.num_rows == 7 * len(arms) * 5
    assert len(set(table["document"].to_pylist())) == 7
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(result))
    nll = np.array(table["nll"].to_pylist())[np.array(table["arm"].to_pylist()) == "DDD"]
    assert result["arms"]["DDD"]["nll"]["estimate"] == pytest.approx(nll.mean(), abs=1e-12)
    assert result["arms"]["restore"]["excess"]["high"] == 0
    # the verdicts can be computed again from the stored scores alone
    assert summarise(table, "DDD", CONFIG)["gates"] == result["gates"]


def test_interrupted_run_goes_on(bridge: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = evaluate(bridge, tmp_path / "whole")
    original, calls = run.score_arms, []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(run, "score_arms", failing)
    with pytest.raises(KeyboardInterrupt):
        evaluate(bridge, tmp_path / "cut")
    assert evaluate(bridge, tmp_path / "cut") == whole
    assert len(calls) == 3  # one batch before the cut, the cut, and the rest: nothing twice


def test_other_settings_are_refused(bridge: Bridge, tmp_path: Path) -> None:
    evaluate(bridge, tmp_path)
    other = EvaluateConfig(**{**CONFIG.__dict__, "targets": 4})
    with pytest.raises(ConfigError, match="targets"):
        evaluate(bridge, tmp_path, other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 1}, "batch_size"),
        ({"windows": (60,)}, "windows"),
        ({"controls": ("empty",)}, "source"),
    ],
)
def test_contradictions_stop_early(bridge: Bridge, tmp_path: Path, changes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        evaluate(bridge, tmp_path, EvaluateConfig(**{**CONFIG.__dict__, **changes}))


@pytest.mark.parametrize(
    ("low", "high", "relation", "expected"),
    [
        (-2.0, -1.0, "<=", "pass"),
        (-1.0, 1.0, "<=", "inconclusive"),
        (0.5, 1.0, "<=", "fail"),
        (0.5, 1.0, ">=", "pass"),
        (-1.0, 1.0, ">=", "inconclusive"),
        (-2.0, -1.0, ">=", "fail"),
    ],
)
def test_verdicts(low: float, high: float, relation, expected: str) -> None:
    interval = Interval((low + high) / 2, low, high, 0.95, 10, 100, 0)
    assert verdict(GateConfig("excess", relation, 0.0), interval) == expected
