"""The fit: equal to scikit-learn on the same rows, resumable, in constant memory, and clear about what fails."""

from __future__ import annotations

import errno
import gc
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_pair
import torch
from sklearn.linear_model import Ridge
from tiny_pair import SMALL

from statebridge.bridge import Bridge, Document, FitConfig, ModelPair, fit_bridge, token_windows
from statebridge.bridge import collect as collect_module
from statebridge.capture import prefill
from statebridge.errors import ConfigError, DocumentError, FitError
from statebridge.state import HybridState, unrotate
from statebridge.translate import BilinearRidge

CONFIG = FitConfig(**SMALL, ridge_alphas=(0.01,), bilinear_alphas=(0.1,), bilinear_iterations=3, plan="TTT")


def states_by_hand(config: FitConfig, length: int) -> tuple[list[HybridState], list[HybridState]]:
    """States of both models for the fit documents, in the batches that the fit uses."""
    pair = tiny_pair.pair()
    windows = token_windows(tiny_pair.documents(14), pair.tokenizer, max(config.checkpoints), 14)[4:]
    ids = torch.stack([window.ids for window in windows])[:, :length]
    with torch.inference_mode():
        parts = [
            [prefill(m, b).state() for b in ids.split(config.batch_size)]
            for m in (pair.source, pair.receiver)
        ]
    return parts[0], parts[1]


def agrees(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Compare one map [D_s, D_r] with scikit-learn's on the same rows."""
    x, y = x.double().numpy(), y.double().numpy()
    centred = x - x.mean(0)
    known = Ridge(alpha=0.01 * (centred**2).sum(0).mean(), solver="cholesky").fit(x, y)
    # 1e-6: the maps are float32, the arithmetic float64
    torch.testing.assert_close(
        weight.double(), torch.tensor(known.coef_.T), atol=1e-6 * abs(known.coef_).max(), rtol=0
    )
    torch.testing.assert_close(
        bias.double(), torch.tensor(known.intercept_), atol=1e-6 * abs(y).max(), rtol=0
    )


def test_equals_sklearn_through_the_whole_pipeline() -> None:
    bridge = fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), CONFIG)
    source, receiver = states_by_hand(CONFIG, 32)

    def rows(states: list[HybridState], name: str, head: int) -> torch.Tensor:
        tensors = []
        for state in states:
            tensor = getattr(state.layers[3], name)
            if name == "key":
                tensor = unrotate(tensor, state.bookkeeping.positions, state.bookkeeping.model.rope)
            tensors.append(tensor[:, head].flatten(0, 1))
        return torch.cat(tensors)

    for name in ("key", "value"):
        for head in (0, 1):
            fitted = bridge.translators[3, name]
            x, y = rows(source, name, head), rows(receiver, name, head)
            assert len(x) == 10 * 32
            agrees(x, y, fitted.weight[head], fitted.bias[head])

    # C: both checkpoints, every tap a row; the first V head begins after two Q and two K heads of 12 channels
    both = [states_by_hand(CONFIG, length) for length in CONFIG.checkpoints]
    conv = [
        torch.cat([s.layers[1].conv_state[:, 48:56].mT.flatten(0, 1) for pair in both for s in pair[side]])
        for side in (0, 1)
    ]
    block = bridge.translators[1, "conv_state"]
    agrees(*conv, block.weights[0][0], block.biases[0][0])

    # R: the estimator on the matrices in the order of the files, document by document, then checkpoint
    def matrices(split: slice) -> Callable[[], Any]:
        sides = [
            torch.stack(
                [torch.cat([s.layers[2].recurrent_state for s in pair[side]]) for pair in both], 1
            ).flatten(0, 1)
            for side in (0, 1)
        ]
        return lambda: iter([(sides[0][split], sides[1][split])])

    every = matrices(slice(None))
    expected = BilinearRidge((0.1,), 3).fit(every, every).map_
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(
            bridge.translators[2, "recurrent_state"].tensors()[name], tensor, atol=1e-6, rtol=1e-6
        )


def largest_difference(one: Bridge, other: Bridge) -> float:
    """Largest difference of any map, relative to the map's largest value."""
    assert one.translators.keys() == other.translators.keys()
    found = 0.0
    for key, translator in one.translators.items():
        theirs = other.translators[key].tensors()
        for name, tensor in translator.tensors().items():
            found = max(found, float((tensor - theirs[name]).abs().max() / tensor.abs().max()))
    return found


def test_batches_do_not_matter() -> None:
    """Tolerance: the models' float32 forward passes differ by rounding with the batch, the moments by less."""
    one = fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), CONFIG)
    other = fit_bridge(
        tiny_pair.pair(), tiny_pair.documents(14), FitConfig(**(vars(CONFIG) | {"batch_size": 3}))
    )
    assert largest_difference(one, other) < 1e-4
    assert largest_difference(one, fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), CONFIG)) == 0


class Interrupt(Exception):
    """Stands for whatever stops a run."""


def counting(monkeypatch: pytest.MonkeyPatch, fail_at: int = -1) -> list[int]:
    """Count forward passes of the fit; fail at one of them."""
    calls: list[int] = []

    def counted(model: Any, ids: torch.Tensor, **options: Any) -> Any:
        calls.append(ids.shape[1])
        if len(calls) == fail_at:
            raise Interrupt
        return prefill(model, ids, **options)

    monkeypatch.setattr(collect_module, "prefill", counted)
    return calls


@pytest.mark.parametrize("fail_at", [1, 4, 6, 11, 16])
def test_an_interrupted_fit_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fail_at: int) -> None:
    whole = fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), CONFIG)
    monkeypatch.setattr(collect_module, "_SAVE_EVERY_SECONDS", -1.0)
    first = counting(monkeypatch, fail_at)
    with pytest.raises(Interrupt):
        fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), CONFIG, work_dir=tmp_path)
    assert len(first) == fail_at
    second = counting(monkeypatch)
    seen: list[tuple[str, int, int]] = []
    resumed = fit_bridge(
        tiny_pair.pair(),
        tiny_pair.documents(14),
        CONFIG,
        work_dir=tmp_path,
        progress=lambda *a: seen.append(a),
    )
    assert largest_difference(whole, resumed) == 0  # bit-exact
    per_batch, batches = 4, 4  # two checkpoints by two models; 4 documents, then 10 in three batches
    assert len(second) == per_batch * (batches - (fail_at - 1) // per_batch)
    assert seen[0] == ("collect", [0, 4, 8, 12, 14][(fail_at - 1) // per_batch], 14)
    assert resumed.config == whole.config


def test_the_work_dir_belongs_to_one_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair, documents = tiny_pair.pair(), tiny_pair.documents(14)
    fit_bridge(pair, documents, CONFIG, work_dir=tmp_path)
    changed = {
        "batch_size": (pair, documents, {"batch_size": 2}),
        "checkpoints": (pair, documents, {"checkpoints": (8, 32)}),
        "documents": (pair, [Document(d.id, d.text.swapcase()) for d in documents], {}),
        "receiver": (ModelPair(pair.source, pair.source, pair.tokenizer), documents, {}),
        "source": (
            ModelPair(tiny_pair.with_theta(pair.source, 9.0), pair.receiver, pair.tokenizer),
            documents,
            {},
        ),
    }
    for name, (other, texts, settings) in changed.items():
        with pytest.raises(ConfigError, match=f"another {name};"):
            fit_bridge(other, texts, FitConfig(**(vars(CONFIG) | settings)), work_dir=tmp_path)
    # what is only decided after collecting can be changed without reading a document again
    calls = counting(monkeypatch)
    again = FitConfig(**(vars(CONFIG) | {"ridge_alphas": (0.5, 1.0), "plan": "DDT"}))
    assert fit_bridge(pair, documents, again, work_dir=tmp_path).config.plan == "DDT"
    assert calls == []
    (tmp_path / "run.json").write_text("[")
    with pytest.raises(ConfigError, match="cannot be used as work_dir"):
        fit_bridge(pair, documents, CONFIG, work_dir=tmp_path)


def test_a_second_run_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    pair, documents = tiny_pair.pair(), tiny_pair.documents(14)
    tried: list[str] = []

    def another(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("collect", 4):
            with pytest.raises(ConfigError, match="Another process works in") as error:
                fit_bridge(pair, documents, CONFIG, work_dir=tmp_path)
            tried.append(str(error.value))

    fit_bridge(pair, documents, CONFIG, work_dir=tmp_path, progress=another)
    assert len(tried) == 1


def test_damaged_moments_are_named(tmp_path: Path) -> None:
    fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), CONFIG, work_dir=tmp_path)
    moments = tmp_path / "moments.0.safetensors"
    moments.write_bytes(moments.read_bytes()[:-100])
    with pytest.raises(FitError, match=r"moments\.0\.safetensors is damaged .* delete"):
        fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), CONFIG, work_dir=tmp_path)


def test_memory_does_not_grow_with_documents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def alive() -> int:
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
        return sum(t.untyped_storage().nbytes() for t in {t.data_ptr(): t for t in tensors}.values())

    held: list[int] = []
    saved, matrices = [], []
    for count in (8, 24):
        folder = tmp_path / str(count)
        config = FitConfig(**(vars(CONFIG) | {"fit_documents": count}))
        documents = tiny_pair.documents(count + 4)
        with caplog.at_level(logging.INFO, "statebridge"):
            fit_bridge(
                tiny_pair.pair(),
                documents,
                config,
                work_dir=folder,
                progress=lambda stage, done, total: held.append(alive()) if done in (8, 28) else None,
            )
        saved.append((folder / "moments.0.safetensors").stat().st_size)
        matrices.append(sum(f.stat().st_size for f in (folder / "recurrent").iterdir()))
        # 3 layers, 4 heads of 12 x 8, float32, two models, two checkpoints; announced before the first document
        assert matrices[-1] == (count + 4) * 2 * 3 * 4 * 12 * 8 * 4 * 2
        assert f"R matrices take {matrices[-1] / 1e6:.2f} MB" in caplog.text
    assert saved[0] == saved[1]
    assert (
        len(held) == 5
    )  # after 8 of 12 documents and 8 of 8 maps, then after 8 and 28 of 28 documents, 8 maps
    assert abs(held[3] - held[2]) < 40_000  # one batch of states at most
    assert matrices[1] == matrices[0] * 28 // 12


def test_a_full_disk_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_space(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = lambda: fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), CONFIG, work_dir=tmp_path)  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 1000}))
        with pytest.raises(
            FitError, match=r"28 states take 0\.26 MB, and .* has 0\.00 MB for them; give another"
        ):
            run()
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", no_space)
        with pytest.raises(FitError, match="give another work_dir, or fewer documents"):
            run()
    with monkeypatch.context() as patch:
        patch.setattr("statebridge.bridge.paired.save_file", no_space)
        with pytest.raises(FitError, match=r"moments cannot be saved .*No space left"):
            run()
    assert isinstance(run(), Bridge)  # and goes on once there is room


@pytest.mark.parametrize("field", ["key", "value", "conv_state", "recurrent_state"])
def test_nan_names_layer_and_documents(monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    index = 3 if field in ("key", "value") else 1
    calls: list[int] = []

    def spoiled(model: Any, ids: torch.Tensor) -> Any:
        live = prefill(model, ids)
        calls.append(1)
        if len(calls) == 8:  # the receiver's state after 32 tokens of the first fit batch
            layer = live.cache.layers[index]
            tensor = {"key": "keys", "value": "values"}.get(field)
            (getattr(layer, tensor) if tensor else getattr(layer, f"{field}s")[0])[0, 0] = float("nan")
        return live

    monkeypatch.setattr(collect_module, "prefill", spoiled)
    with pytest.raises(
        FitError, match=rf"Layer {index}: .*receiver.* NaN.*32 tokens of the documents topics-4"
    ):
        fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), CONFIG)


def test_progress_is_monotone() -> None:
    seen: list[tuple[str, int, int]] = []
    fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), CONFIG, progress=lambda *a: seen.append(a))
    assert seen[:5] == [("collect", n, 14) for n in (0, 4, 8, 12, 14)]
    assert seen[5:] == [("fit", n, 8) for n in range(9)]


def test_too_few_documents_are_counted() -> None:
    documents = [Document("empty", ""), Document("short", "a few words"), *tiny_pair.documents(13)]
    with pytest.raises(
        DocumentError, match=r"14 documents of at least 32 tokens .* 13 were found \(2 were shorter\)"
    ):
        fit_bridge(tiny_pair.pair(), documents, CONFIG)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fit_documents": 1}, "fit_documents must be at least 2"),
        ({"batch_size": 0}, "batch_size"),
        ({"checkpoints": ()}, "checkpoints"),
        ({"checkpoints": (8, 8)}, "different positive lengths"),
        ({"ridge_alphas": (-1.0,)}, "ridge_alphas must hold non-negative"),
        ({"bilinear_alphas": (0.0,)}, "bilinear_alphas must hold positive"),
        ({"plan": "XXX"}, "'XXX' is no choice for K, R, C"),
    ],
)
def test_settings_are_checked_before_anything_runs(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FitConfig(**(vars(CONFIG) | settings))


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next", "olmo_hybrid", "qwen3"])
def test_other_families_are_fitted(family: str) -> None:
    source, receiver = (tiny.build(family, seed=seed, vocab_size=260) for seed in (1, 2))
    pair = ModelPair(source, receiver, tiny_pair.tokenizer())
    bridge = fit_bridge(pair, tiny_pair.documents(14), CONFIG)
    reply = pair.handoff("Some text to hand over", bridge=bridge, max_new_tokens=2)
    assert reply.prefix_tokens_processed == 0
    assert (reply.moved_bytes["R"] > 0) == (family != "qwen3")


def test_models_that_do_not_correspond() -> None:
    source = tiny_pair.pair().source
    others = {
        "layers": {"num_hidden_layers": 8},
        "2 KV heads in the source and 4": {"num_key_value_heads": 4},
        "4 recurrent heads in the source and 2": {"linear_num_value_heads": 2},
        "convolution heads": {"linear_key_head_dim": 10},
        "4 convolution taps in the source and 3": {"linear_conv_kernel_dim": 3},
    }
    for message, change in others.items():
        pair = ModelPair(source, tiny.build("qwen3_5", vocab_size=260, **change), tiny_pair.tokenizer())
        with pytest.raises(FitError, match=message):
            fit_bridge(pair, tiny_pair.documents(14), CONFIG)
    mamba = tiny.build("bamba", vocab_size=260)
    with pytest.raises(FitError, match="Only Gated DeltaNet"):
        fit_bridge(ModelPair(mamba, mamba, tiny_pair.tokenizer()), tiny_pair.documents(14), CONFIG)


def test_the_report_survives_json() -> None:
    fit = fit_bridge(tiny_pair.pair(), tiny_pair.documents(14), CONFIG).config.fit
    assert json.loads(json.dumps(fit)) == fit
    assert fit["documents"]["validation"] == [f"topics-{i}" for i in range(4)]
    assert set(fit["errors"]) == {
        "3.key",
        "3.value",
        *(f"{i}.{n}_state" for i in range(3) for n in ("conv", "recurrent")),
    }
