"""A whole run with every section and a calibrator: the tables are right, the run is refused early where it must."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import tiny_pair
import torch

from statebridge.bridge import Bridge, ModelPair
from statebridge.calibrate import Calibrator
from statebridge.errors import ConfigError, StatebridgeError, StateMismatch
from statebridge.evaluate import run, sections
from statebridge.evaluate.arms import Protocol, batches, handovers, score_arms
from statebridge.evaluate.config import (
    BranchConfig,
    EvaluateConfig,
    GateConfig,
    GenerationConfig,
    RecallConfig,
)
from statebridge.evaluate.report import load_run, verify, write_report

CONFIG = EvaluateConfig(
    count=3,
    prefix=130,
    targets=3,
    batch_size=3,
    plans=(),
    windows=(2,),
    handover_windows=(2,),
    resamples=50,
    recall=RecallConfig(depths=(110,), items_per_depth=2, distractors=1),
    generation=GenerationConfig(documents=2, new_tokens=3),
    gates={"possible": (GateConfig("nll", ">=", 0.0),), "impossible": (GateConfig("nll", "<=", 0.0),)},
    branches=(
        BranchConfig("passed", 20, count=2, behind="possible"),
        BranchConfig("held back", 20, behind="impossible"),
        BranchConfig("asked for", 20, count=2, behind="impossible", on_request=True),
    ),
)


@pytest.fixture(scope="module")
def bridge() -> Bridge:
    """A direct bridge with a calibrator that moves every component."""
    pair = tiny_pair.pair()
    layers = pair.receiver_identity.layers
    calibrator = Calibrator.identity(layers, rank=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in calibrator.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    report = {"grid": [], "chosen": {}, "validation_kl": {}, "trainable_values": calibrator.trainable_values}
    return Bridge.direct(pair.source_identity, pair.receiver_identity).with_calibrator(calibrator, report)


@pytest.fixture(scope="module")
def folder(bridge: Bridge, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evaluate") / "run"
    run.evaluate(tiny_pair.pair(), bridge, CONFIG, out=out, documents=tiny_pair.documents(3))
    return out


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text())


def test_the_calibrated_bridge_is_the_handover(bridge: Bridge, folder: Path, result: dict[str, Any]) -> None:
    assert result["handover"] == "calibrated"
    assert {"DDD", "wrong donor", "wrong donor DDD"} < set(result["arms"])
    pair = tiny_pair.pair()
    windows = [w.ids for w in _windows(3)]
    plain = score_arms(
        pair, torch.stack(windows), Protocol(130, 3), bridge=bridge.with_plan("DDD"), controls=()
    )
    nll = load_run(folder).nll
    # equal up to float32 as the table stores it: the same pass over the same batch
    assert nll["DDD"].tolist() == plain["DDD"].nll.double().tolist()
    assert abs(nll["calibrated"] - nll["DDD"]).max() > 1e-2
    assert abs(nll["wrong donor"] - nll["wrong donor DDD"]).max() > 1e-2


def _windows(count: int):
    from statebridge.bridge import token_windows

    return token_windows(tiny_pair.documents(count), tiny_pair.tokenizer(), 134, count)


def test_residuals_are_what_separates_plan_and_calibrated(bridge: Bridge, folder: Path) -> None:
    from statebridge.capture import prefill

    windows = _windows(3)
    ids = torch.stack([w.ids[:130] for w in windows])
    source = prefill(tiny_pair.pair().source, ids).state()
    bridges = handovers(bridge)
    before, after = (bridges[name](source) for name in ("DDD", "calibrated"))
    rows = pq.read_table(folder / "residuals.parquet").to_pylist()
    assert len(rows) == 3 * sum(len(list(layer.tensors())) for layer in before.layers)
    for row in rows:
        d = [w.id for w in windows].index(row["document"])
        planned, moved = (getattr(s.layers[row["layer"]], row["field"])[d].double() for s in (before, after))
        # tolerance: float32 sums in another order
        assert row["residual"] == pytest.approx(float((moved - planned).norm() / planned.norm()), rel=1e-3)
        assert row["residual"] > 1e-3


def test_branches_wait_for_their_gates(folder: Path, result: dict[str, Any]) -> None:
    assert {name: branch["status"] for name, branch in result["branches"].items()} == {
        "passed": "behind its gate",
        "held back": "not run",
        "asked for": "on request",
    }
    assert sorted(path.name for path in (folder / "branches").iterdir()) == ["asked for", "passed"]
    inner = load_run(folder / "branches" / "passed")
    assert (inner.config.prefix, inner.config.count, inner.config.branches) == (20, 2, ())
    assert set(inner.tables) == {"scores", "residuals"}


def test_every_figure_can_be_recomputed(folder: Path) -> None:
    html, md = write_report(folder)
    assert html.stat().st_size > 100_000
    assert "| asked for | 20 | impossible: fail | on request |" in md.read_text()
    assert (folder / "branches" / "passed" / "report.html").exists()
    assert verify(load_run(folder)) == []
    path = folder / "branches" / "passed" / "result.json"
    text = path.read_text()
    path.write_text(text.replace('"documents": 2,', '"documents": 3,', 1))
    assert verify(load_run(folder)) == ["branches/passed: documents: result.json says 3, the tables give 2"]
    path.write_text(text)


def test_nothing_is_computed_twice(bridge: Bridge, folder: Path, result, monkeypatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(run, "score_arms", never)
    for name in ("answer", "generation_table", "residual_table"):
        monkeypatch.setattr(sections, name, never)
    again = run.evaluate(tiny_pair.pair(), bridge, CONFIG, out=folder, documents=tiny_pair.documents(3))
    assert json.loads(json.dumps(again)) == result


def test_another_bridge_is_refused(bridge: Bridge, folder: Path) -> None:
    """Same plan, same models, other residuals: its scores would mix with those that are there."""
    assert bridge.calibrator is not None
    other = bridge.with_calibrator(Calibrator.identity(bridge.config.receiver.layers, rank=2))
    with pytest.raises(ConfigError, match="another bridge"):
        run.evaluate(tiny_pair.pair(), other, CONFIG, out=folder, documents=tiny_pair.documents(3))


def test_a_bridge_of_another_pair_is_refused(bridge: Bridge, tmp_path: Path) -> None:
    pair = tiny_pair.pair()
    swapped = ModelPair(pair.receiver, pair.source, pair.tokenizer)
    with pytest.raises(StateMismatch, match="another source"):
        run.evaluate(swapped, bridge, CONFIG, out=tmp_path / "run", documents=[])
    config = dataclasses.replace(CONFIG, plans="all")
    with pytest.raises(StateMismatch, match="translator of layer"):
        run.evaluate(pair, bridge, config, out=tmp_path / "run", documents=[])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation": GenerationConfig(documents=1)}, "generation.documents"),
        ({"generation": GenerationConfig(documents=2, temperature=0)}, "temperature"),
        ({"recall": RecallConfig(depths=(500,), items_per_depth=1)}, "recall.depths"),
        ({"gates": {"g": (GateConfig("handover − window 9", "<=", 0.0),)}, "branches": ()}, "window 9"),
        ({"branches": (BranchConfig("far", 500),)}, "near native"),
        ({"branches": (BranchConfig("short", 2, on_request=True),)}, "short"),
    ],
)
def test_contradictions_stop_early(bridge: Bridge, tmp_path: Path, changes, message: str) -> None:
    config = dataclasses.replace(CONFIG, **changes)
    with pytest.raises(ConfigError, match=message):
        run.evaluate(tiny_pair.pair(), bridge, config, out=tmp_path, documents=tiny_pair.documents(3))
    assert not any(tmp_path.iterdir())


def test_nan_is_named_and_what_was_done_is_kept(bridge: Bridge, tmp_path: Path, monkeypatch) -> None:
    config = dataclasses.replace(
        CONFIG, count=4, batch_size=2, recall=RecallConfig(), generation=GenerationConfig(), branches=()
    )
    original, calls = run.score_arms, []

    def poisoned(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        calls.append(1)
        if len(calls) == 2:
            with torch.inference_mode():
                found["empty"].nll[1, 2] = float("nan")
        return found

    monkeypatch.setattr(run, "score_arms", poisoned)
    with pytest.raises(StatebridgeError, match="arm empty scores NaN or infinity on the document 'topics-3'"):
        run.evaluate(tiny_pair.pair(), bridge, config, out=tmp_path, documents=tiny_pair.documents(4))
    assert [path.name for path in (tmp_path / "parts" / "scores").iterdir()] == ["000000.parquet"]


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (7, 3, [(0, 3), (3, 7)]),
        (6, 3, [(0, 3), (3, 6)]),
        (5, 3, [(0, 3), (3, 5)]),
        (2, 4, [(0, 2)]),
    ],
)
def test_no_batch_of_one(count: int, size: int, expected) -> None:
    assert batches(count, size) == expected
