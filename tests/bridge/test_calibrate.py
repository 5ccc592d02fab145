"""Training a calibrator through the frozen receiver of the tiny pair."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_pair
import torch
from safetensors.torch import load_file

from statebridge.bridge import Bridge, CalibrateConfig, TokenWindow, fit_calibrator, token_windows
from statebridge.bridge import calibrate_documents as preparation
from statebridge.bridge.backward import BackwardPath
from statebridge.bridge.calibrate_documents import Batch, CalibrationDocuments
from statebridge.bridge.calibrate_train import Trainer, divergence
from statebridge.calibrate import Calibrator
from statebridge.capture import continue_from, prefill
from statebridge.errors import ConfigError, DocumentError, FitError, StateMismatch

PREFIX, POSITIONS = 20, 4
SMALL: dict[str, Any] = {
    "prefix": PREFIX,
    "positions": POSITIONS,
    "ranks": (2,),
    "penalties": (0.01,),
    "learning_rate": 0.02,
    "batch_size": 3,
    "micro_batch": 2,
    "max_steps": 6,
    "evaluate_every": 2,
}


@functools.cache
def windows() -> dict[str, list[TokenWindow]]:
    """Four documents to fit, three to validate."""
    pair = tiny_pair.pair()
    found = token_windows(tiny_pair.documents(7), pair.tokenizer, PREFIX + POSITIONS, 7)
    return {"fit": found[:4], "validation": found[4:]}


@functools.cache
def direct() -> Bridge:
    pair = tiny_pair.pair()
    return Bridge.direct(pair.source_identity, pair.receiver_identity)


def fit(work_dir: Path | None = None, progress: Any = None, **settings: Any) -> Bridge:
    config = CalibrateConfig(**{**SMALL, **settings})
    options = {} if progress is None else {"progress": progress}
    return fit_calibrator(tiny_pair.pair(), direct(), windows(), config, work_dir=work_dir, **options)  # type: ignore[arg-type]


@functools.cache
def calibrated() -> Bridge:
    return fit()


def tensors(bridge: Bridge) -> dict[str, torch.Tensor]:
    assert bridge.calibrator is not None
    return bridge.calibrator.tensors()


def same(one: Bridge, other: Bridge) -> bool:
    """Whether two calibrators and their reports are equal to the last bit."""
    ours, theirs = tensors(one), tensors(other)
    return (
        ours.keys() == theirs.keys()
        and all(torch.equal(x, theirs[name]) for name, x in ours.items())
        and one.config.calibration == other.config.calibration
    )


def kl_by_hand(bridge: Bridge, window: TokenWindow) -> torch.Tensor:
    """KL of every position of one document, from the public functions alone."""
    pair = tiny_pair.pair()
    prefix, after = window.ids[None, :PREFIX], window.ids[None, PREFIX : PREFIX + POSITIONS]
    native = continue_from(pair.receiver, prefill(pair.receiver, prefix), after).logits
    handed = continue_from(pair.receiver, bridge(prefill(pair.source, prefix).state()), after).logits
    p, q = native.double().softmax(-1), handed.double().softmax(-1)
    return (p * (p.log() - q.log())).sum(-1)[0]


def random_batch(rows: int = 2) -> Batch:
    """A batch whose base state is the source's own, and the native logits of its documents."""
    pair = tiny_pair.pair()
    ids = torch.stack([window.ids for window in windows()["fit"][:rows]])
    base = direct()(prefill(pair.source, ids[:, :PREFIX]).state())
    native = continue_from(pair.receiver, prefill(pair.receiver, ids[:, :PREFIX]), ids[:, PREFIX:]).logits
    return Batch(base, ids[:, PREFIX:], native)


def test_training_lowers_the_kl_that_public_functions_measure() -> None:
    bridge = calibrated()
    report = bridge.config.calibration
    for name, arm in (("plan", direct()), ("calibrated", bridge)):
        by_hand = torch.stack([kl_by_hand(arm, window) for window in windows()["validation"]])
        # float32 logits against float64 sums, and batches of two against single rows
        torch.testing.assert_close(
            torch.tensor(report["validation_kl"][name]).double(), by_hand.mean(1), rtol=1e-4, atol=1e-5
        )
        torch.testing.assert_close(
            torch.tensor(report["validation_kl_by_position"][name]).double(),
            by_hand.mean(0),
            rtol=1e-4,
            atol=1e-5,
        )
    before, after = (sum(report["validation_kl"][name]) / 3 for name in ("plan", "calibrated"))
    assert after < 0.99 * before
    assert report["chosen"]["validation_kl"] == pytest.approx(after, rel=1e-6)


def test_every_component_has_the_gradient_that_finite_differences_find() -> None:
    batch = random_batch()
    pair = tiny_pair.pair()
    calibrator = Calibrator.identity(pair.receiver_identity.layers, rank=2)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in calibrator.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    named = dict(calibrator.named_parameters())
    gradients = torch.autograd.grad(divergence(pair.receiver, calibrator, batch).sum(), list(named.values()))
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        direction = gradient / gradient.norm()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * 2e-3)
                values.append(float(divergence(pair.receiver, calibrator, batch).sum()))
                parameter.add_(direction, alpha=-sign * 2e-3)
        slope = (values[0] - values[1]) / 4e-3
        # float32 losses near 10 differ by about 1e-6, which 4e-3 makes 5e-4
        assert slope == pytest.approx(float(gradient.norm()), rel=0.03, abs=2e-3), name


def trainer(folder: Path, **settings: Any) -> Trainer:
    """A trainer over prepared documents, which has not begun."""
    from accelerate import PartialState

    pair, config = tiny_pair.pair(), CalibrateConfig(**{**SMALL, **settings})
    documents = CalibrationDocuments(pair, direct(), windows(), config, folder / "documents")  # type: ignore[arg-type]
    documents.prepare(lambda *_: None)
    path, process = BackwardPath("installed", "as in the tests"), PartialState(cpu=True)
    return Trainer(pair.receiver, documents, config, process, folder / "training.safetensors", path)


def test_a_step_follows_the_gradient_of_the_loss(tmp_path: Path) -> None:
    """Mean over documents of the mean KL of positions plus weight times penalty, in micro-batches of 2 and 1."""
    pair, weight = tiny_pair.pair(), 0.3
    made = trainer(tmp_path)
    calibrator = Calibrator.identity(pair.receiver_identity.layers, rank=2)
    with torch.no_grad():
        for number, parameter in enumerate(calibrator.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    numbers = made._order(5)
    assert len(set(numbers)) > 1
    kl, penalty = torch.zeros(()), torch.zeros(())
    for n in numbers:
        ids = windows()["fit"][n].ids[None, : PREFIX + POSITIONS]
        base = direct()(prefill(pair.source, ids[:, :PREFIX]).state())
        native = continue_from(pair.receiver, prefill(pair.receiver, ids[:, :PREFIX]), ids[:, PREFIX:]).logits
        with torch.enable_grad():
            kl = kl + divergence(pair.receiver, calibrator, Batch(base, ids[:, PREFIX:], native)).mean() / 3
            moved = [
                ((y - x) ** 2).sum() / (x**2).sum()
                for one, other in zip(base.layers, calibrator(base.layers), strict=True)
                for (_, x), (_, y) in zip(one.tensors(), other.tensors(), strict=True)
            ]
            penalty = penalty + torch.stack(moved).mean() / 3
    wanted = torch.autograd.grad(kl + weight * penalty, list(calibrator.parameters()))
    losses = made._step(calibrator, torch.optim.Adam(calibrator.parameters(), lr=0.0), weight, 5)
    pair.receiver.zero_grad()  # `fit_calibrator` freezes it, a trainer by itself does not
    torch.testing.assert_close(losses, torch.stack((kl, penalty)).detach(), rtol=1e-4, atol=1e-6)
    for (name, parameter), gradient in zip(calibrator.named_parameters(), wanted, strict=True):
        # batches of two against single rows in float32
        torch.testing.assert_close(
            parameter.grad, gradient, rtol=2e-3, atol=1e-5, msg=lambda m, n=name: n + m
        )


def test_every_document_is_trained_on_once_before_any_is_twice(tmp_path: Path) -> None:
    """The order depends on the seed and the step alone, and is another one in every round."""
    made, other = trainer(tmp_path), trainer(tmp_path, seed=1)
    steps = [made._order(step) for step in range(16)]  # 48 places, 12 rounds of 4 documents
    flat = [number for numbers in steps for number in numbers]
    rounds = [tuple(flat[start : start + 4]) for start in range(0, 48, 4)]
    assert all(sorted(found) == [0, 1, 2, 3] for found in rounds)
    assert len(set(rounds)) > 3
    assert [made._order(step) for step in reversed(range(16))] == steps[::-1]
    assert [other._order(step) for step in range(16)] != steps


def test_a_bridge_applies_its_plan_and_then_its_calibrator(fitted: Bridge) -> None:
    pair = tiny_pair.pair()
    state = prefill(pair.source, windows()["fit"][0].ids[None, :PREFIX]).state()
    calibrator = calibrated().calibrator
    assert calibrator is not None
    for plan in ("DDD", "TDT"):
        base = fitted.with_plan(plan)
        both = base.with_calibrator(calibrator)(state)
        apart = calibrator(base(state).layers)
        for one, other in zip(both.layers, apart, strict=True):
            for (_, x), (_, y) in zip(one.tensors(), other.tensors(), strict=True):
                # float32 rounding: a bridge moves equal parts of several layers in one product
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
        assert not any(x.requires_grad for layer in both.layers for _, x in layer.tensors())
    assert fitted.with_calibrator(calibrator).with_plan("TDD").calibrator is None


def test_models_come_out_as_they_went_in() -> None:
    pair = tiny_pair.pair()
    before = {name: x.clone() for name, x in pair.receiver.state_dict().items()}
    pair.receiver.lm_head.weight.requires_grad_(False)
    pair.receiver.train()
    try:
        with pytest.raises(FitError, match="grid point 0 is nan after 2 steps; lower learning_rate"):
            fit(learning_rate=1e30, max_steps=40, patience=40)
        assert pair.receiver.training
        assert not pair.receiver.lm_head.weight.requires_grad
        assert pair.receiver.model.embed_tokens.weight.requires_grad
    finally:
        pair.receiver.lm_head.weight.requires_grad_(True)
        pair.receiver.eval()
    assert all(torch.equal(x, before[name]) for name, x in pair.receiver.state_dict().items())
    assert all(parameter.grad is None for parameter in pair.receiver.parameters())


def test_same_seed_same_bits_and_another_seed_other_bases() -> None:
    assert same(fit(), calibrated())
    assert not torch.equal(*(tensors(b)["layers.3.key.basis"] for b in (fit(seed=1), calibrated())))


@pytest.mark.parametrize(
    ("stage", "states"),
    [("read documents", "disk"), ("calibrate", "disk"), ("ablate", "disk"), ("calibrate", "device")],
)
def test_an_interrupted_run_goes_on_to_the_same_bits(stage: str, states: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"penalties": (0.01, 0.1), "max_steps": 4, "states": states}
    seen: list[int] = []

    def stop(name: str, done: int, total: int) -> None:
        if name == stage:
            seen.append(done)
            if len(seen) == (8 if stage == "calibrate" else 2):  # in the second grid point, after three steps
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, stop, **settings)
    stages: list[tuple[str, int]] = []
    again = fit(tmp_path, lambda name, done, total: stages.append((name, done)), **settings)
    assert same(again, fit(**settings))
    first = next(done for name, done in stages if name == "calibrate")
    assert first == {"read documents": 0, "calibrate": 6, "ablate": 8}[stage]


def test_a_changed_setting_is_refused_by_name(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=1)
    with pytest.raises(ConfigError, match="another setting learning_rate; choose another work_dir"):
        fit(tmp_path, max_steps=1, learning_rate=0.5)


def test_micro_batches_change_rounding_only() -> None:
    one, other = fit(micro_batch=1), fit(micro_batch=3)
    for name, x in tensors(one).items():
        # Adam's first steps turn rounding of tiny gradients into up to a few per cent of a step of 0.02
        torch.testing.assert_close(x, tensors(other)[name], rtol=0.05, atol=2e-3)
    ours, theirs = (b.config.calibration["chosen"]["validation_kl"] for b in (one, other))
    assert ours == pytest.approx(theirs, rel=1e-3)


def test_the_grid_is_searched_and_the_best_point_chosen() -> None:
    bridge = fit(ranks=(1, 2), penalties=(0.0, 1e4), max_steps=4)
    report = bridge.config.calibration
    assert [(p["rank"], p["penalty"]) for p in report["grid"]] == [(1, 0.0), (1, 1e4), (2, 0.0), (2, 1e4)]
    best = min(report["grid"], key=lambda point: point["validation_kl"])
    assert report["chosen"] == {key: value for key, value in best.items() if key != "curve"}
    assert best["penalty"] == 0.0  # the other weight holds the state still
    assert tensors(bridge)["layers.3.key.update"].shape[1] == best["rank"]
    for point in report["grid"]:
        assert [entry["step"] for entry in point["curve"]] == [0, 2, 4]
        assert point["validation_kl"] == min(entry["validation_kl"] for entry in point["curve"])
        assert point["curve"][0]["validation_kl"] == report["grid"][0]["curve"][0]["validation_kl"]
    still, free = (
        next(p for p in report["grid"] if p["rank"] == 2 and p["penalty"] == weight)["curve"][-1][
            "train_penalty"
        ]
        for weight in (1e4, 0.0)
    )
    assert still < free / 10


def test_training_that_makes_things_worse_stops_early_and_leaves_the_identity() -> None:
    bridge = fit(learning_rate=20.0, max_steps=40, evaluate_every=1, patience=3)
    report = bridge.config.calibration
    assert [entry["step"] for entry in report["grid"][0]["curve"]] == [0, 1, 2, 3]
    assert report["chosen"]["step"] == 0
    assert report["validation_kl"]["calibrated"] == report["validation_kl"]["plan"]


def test_components_can_be_left_out_and_the_report_shows_each_switched_off() -> None:
    report = calibrated().config.calibration
    assert set(report["validation_kl"]) == {"plan", "calibrated", "without K", "without R", "without C"}
    assert len({tuple(values) for values in report["validation_kl"].values()}) == 5
    assert report["trainable_values"] < report["values"]
    norms = report["residual_norms"]
    assert set(norms) == {"0", "1", "2", "3"}
    assert set(norms["0"]) == {"layer", "recurrent_state", "conv_state"}
    assert set(norms["3"]) == {"layer", "key", "value"}
    assert 0 < min(n["layer"] for n in norms.values()) < max(n["layer"] for n in norms.values()) < 2
    alone = fit(components=("R",), max_steps=2)
    assert {name.split(".")[2] for name in tensors(alone)} == {"recurrent_state"}
    assert set(alone.config.calibration["validation_kl"]) == {"plan", "calibrated"}


def test_a_calibrated_bridge_is_saved_whole(tmp_path: Path) -> None:
    calibrated().save_pretrained(tmp_path)
    again = Bridge.from_pretrained(tmp_path)
    assert same(again, calibrated())
    assert any(name.startswith("calibrator.") for name in load_file(tmp_path / "model.safetensors"))
    assert again.with_plan("DDD").config.calibration == {}


def test_a_calibrator_of_another_geometry_is_refused() -> None:
    other = tiny_pair.pair(linear_value_head_dim=12).receiver_identity.layers
    with pytest.raises(StateMismatch, match="does not fit the receiver"):
        direct().with_calibrator(Calibrator.identity(other, rank=2))


def test_a_bridge_of_another_pair_is_refused() -> None:
    other = tiny_pair.pair(linear_value_head_dim=12)
    with pytest.raises(StateMismatch, match="another source"):
        fit_calibrator(other, direct(), windows(), CalibrateConfig(**SMALL))  # type: ignore[arg-type]


def test_documents_that_cannot_serve_are_named() -> None:
    fit_split, validation = windows()["fit"], windows()["validation"]
    short = TokenWindow("tiny", fit_split[0].ids[:10])
    for given, message in (
        ({"fit": fit_split}, "no validation documents"),
        (
            {"fit": [*fit_split, short], "validation": validation},
            "document tiny has 10 tokens, calibration needs 24",
        ),
        ({"fit": fit_split, "validation": [*validation, fit_split[1]]}, "topics-1 is in both splits"),
    ):
        with pytest.raises(DocumentError, match=message):
            fit_calibrator(tiny_pair.pair(), direct(), given, CalibrateConfig(**SMALL))  # type: ignore[arg-type]


def test_a_state_with_nan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(model: Any, ids: torch.Tensor, **options: Any) -> Any:
        live = prefill(model, ids, **options)
        if model is tiny_pair.pair().source and torch.equal(ids[-1], windows()["fit"][1].ids[:PREFIX]):
            live.cache.layers[1].recurrent_states[0][-1, 0, 0, 0] = float("nan")
        return live

    monkeypatch.setattr(preparation, "prefill", spoilt)
    with pytest.raises(FitError, match="layer 1 recurrent_state of the document topics-1 holds NaN"):
        fit()


def test_a_full_disk_is_seen_beforehand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))  # type: ignore[attr-defined]
    with pytest.raises(FitError, match=r'7 states of .* do not fit .* "recompute"'):
        fit(tmp_path)
    assert not list(tmp_path.rglob("*.state.safetensors"))
    assert fit(tmp_path / "other", states="recompute", max_steps=1).calibrator is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"positions": 0},
        {"ranks": ()},
        {"penalties": (-1.0,)},
        {"learning_rate": float("nan")},
        {"components": ("X",)},
        {"components": ()},
        {"states": "memory"},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CalibrateConfig(**wrong)


_WORKER = """
import sys
sys.path[:0] = [{tests!r}, {here!r}]
import conftest, test_calibrate
bridge = test_calibrate.fit({folder!r}, batch_size=3, micro_batch=1, states={states!r})
from accelerate import PartialState
assert PartialState().num_processes == 2
bridge.save_pretrained({folder!r} + "/bridge." + str(PartialState().process_index))
PartialState().destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize("states", ["disk", "device"])
def test_two_processes_train_what_one_does(states: str, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    here = Path(__file__).parent
    script.write_text(
        _WORKER.format(tests=str(here.parent), here=str(here), folder=str(tmp_path), states=states)
    )
    # what `accelerate launch` starts for GPUs; on CPU it starts a single process
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    pair_of_bridges = [Bridge.from_pretrained(tmp_path / f"bridge.{rank}") for rank in (0, 1)]
    assert same(*pair_of_bridges)
    alone = fit(batch_size=3, micro_batch=1, states=states)
    for name, x in tensors(alone).items():
        # sums in another order: float32 rounding, which Adam's first steps can enlarge
        torch.testing.assert_close(x, tensors(pair_of_bridges[0])[name], rtol=0.02, atol=1e-3)
    ours, theirs = (b.config.calibration["chosen"]["validation_kl"] for b in (alone, pair_of_bridges[0]))
    assert ours == pytest.approx(theirs, rel=1e-4)
