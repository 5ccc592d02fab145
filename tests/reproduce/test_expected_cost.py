"""What a dry run says, against a count by hand; sizes of the published models without their weights."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import tiny_pair
import torch
from safetensors.torch import load_file

from statebridge.bridge import Bridge, TokenWindow
from statebridge.bridge.calibrate_documents import CalibrationDocuments
from statebridge.calibrate import Calibrator
from statebridge.capture import prefill
from statebridge.capture.shapes import random_model, shape_of, size_of
from statebridge.errors import ConfigError, UnsupportedModel
from statebridge.reproduce import SuiteConfig
from statebridge.reproduce.config_parts import ThroughputConfig
from statebridge.reproduce.dry_run import dry_run
from statebridge.state import LayerSpec


def test_the_published_sizes_follow_from_the_shapes() -> None:
    """Counted without a weight: parameters, and bytes of a state of 4,096 tokens, as published."""
    source, receiver = (size_of(f"Qwen/Qwen3.5-{name}-Base") for name in ("4B", "9B"))
    assert (source.parameters, receiver.parameters) == (4_205_751_296, 8_953_803_264)
    assert source.state_bytes(4096) == receiver.state_bytes(4096) == 186_122_240
    assert source.weight_bytes == 2 * source.parameters


def test_the_published_calibrator_has_its_size() -> None:
    config = shape_of("Qwen/Qwen3.5-9B-Base")
    channels = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    channels += config.linear_num_value_heads * config.linear_value_head_dim
    attention = LayerSpec(key=(4, 256), value=(4, 256))
    delta = LayerSpec(recurrent_state=(32, 128, 128), conv_state=(channels, 4))
    layers = tuple(attention if kind == "full_attention" else delta for kind in config.layer_types)
    assert Calibrator.identity(layers, rank=4).trainable_values == 434_176


def test_a_size_is_that_of_a_real_state(config: SuiteConfig) -> None:
    size = size_of(config.models.receiver, "float32")
    model = tiny_pair.pair().receiver
    state = prefill(model, torch.arange(24).reshape(2, 12)).state()
    assert 2 * size.state_bytes(12) == sum(state.nbytes().values())
    assert size.parameters == sum(p.numel() for p in model.parameters())


def test_a_size_needs_no_kernel(config: SuiteConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fla is installed, its kernels stand before the torch functions, and cannot run without values."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as file

    def kernel(function: Any) -> Any:
        @functools.wraps(function)
        def refuse(*args: object, **kwargs: object) -> None:
            raise AssertionError("a kernel was run on the meta device")

        return refuse

    before = size_of(config.models.source, "float32")
    for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn"):
        monkeypatch.setattr(file, name, kernel(getattr(file, name)))
    assert size_of(config.models.source, "float32") == before


def test_random_weights_have_the_shape_and_not_the_values(config: SuiteConfig) -> None:
    model = random_model(config.models.receiver, "float32", "cpu", seed=3)
    again = random_model(config.models.receiver, "float32", "cpu", seed=3)
    real = tiny_pair.pair().receiver
    for ours, same, theirs in zip(model.parameters(), again.parameters(), real.parameters(), strict=True):
        assert ours.shape == theirs.shape
        assert torch.equal(ours, same)
    head = model.get_output_embeddings().weight
    assert not torch.equal(head, real.get_output_embeddings().weight)
    # 64 wide: each projection keeps the size of its input
    assert float(head.std()) == pytest.approx(64**-0.5, rel=0.1)


def test_unknown_names_and_dtypes_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="no/such-model"):
        size_of("no/such-model")
    with pytest.raises(ConfigError, match="'float99' is no dtype"):
        size_of("Qwen/Qwen3.5-4B-Base", "float99")


def test_a_dry_run_is_a_count_by_hand(config: SuiteConfig) -> None:
    throughput = ThroughputConfig(source=100.0, receiver=50.0, pass_seconds=0.5, state_bytes=1000.0)
    plan = dry_run(dataclasses.replace(config, throughput=throughput), "all")
    found = {name: dataclasses.astuple(stage)[:7] for name, stage in plan.stages.items()}
    # documents, source passes and tokens, receiver passes and tokens, passes and tokens with gradients
    assert found["documents"] == (10 + 4 + 4 + 4 + 2 + 2, 0, 0, 0, 0, 0, 0)
    # 2 contexts at 2 lengths, each read once and continued twice by 8 tokens
    assert found["restore"] == (2, 12, 2 * (8 + 16 + 4 * 8), 12, 2 * (8 + 16 + 4 * 8), 0, 0)
    # 10 documents in 1 + 2 batches at 16 and 32 tokens
    assert found["fit"] == (10, 6, 10 * 48, 6, 10 * 48, 0, 0)
    # two batches of 2: source 32 + 6; receiver 32 + 6, then 8 plans, restore, empty (in two passes), kv only and
    # wrong donor of 6 tokens each
    assert found["e001"] == (4, 2 * 2, 4 * 38, 2 * (2 + 12 + 1), 4 * (38 + 12 * 6), 0, 0)
    assert found["selection"] == (4, 2, 4 * 32, 2 * (2 + 8), 4 * (38 + 8 * 6), 0, 0)
    # 6 + 4 documents by threes; 4 steps of 3 documents at 3 positions, judged 1 + 2 times and in 5 variants
    judged = 8
    assert found["calibrate"] == (
        10,
        4,
        10 * 32,
        2 * 4 + judged * 2 + 4,
        10 * 35 + judged * 4 * 3,
        4,
        4 * 3 * 3,
    )
    # as e001, and: calibrated, the plan's wrong donor, W = 4 read alone and after a hand-over, residuals
    e002 = (4, 2 * 3 + 2, 4 * (38 + 28 + 32), 2 * (2 + 14 + 1 + 4), 4 * (38 + 14 * 6 + 2 * 10), 0, 0)
    assert found["e002"] == e002
    whole = plan.whole
    assert whole.source_tokens == sum(row[2] for row in found.values())
    assert whole.disk_bytes == max(stage.disk_bytes for stage in plan.stages.values())
    # R of both models, float32, of 10 documents at 2 lengths: 3 layers of 4 heads of 12 by 8
    assert plan.stages["fit"].disk_bytes == 4 * 20 * 2 * 3 * 4 * 12 * 8
    state = plan.sizes.receiver.state_bytes(32)
    assert plan.stages["calibrate"].disk_bytes == 10 * (state + 3 * 260 * 4)
    weights = plan.sizes.source.weight_bytes + plan.sizes.receiver.weight_bytes
    assert plan.stages["restore"].device_bytes == weights + 3 * plan.sizes.source.state_bytes(16)
    fit = plan.stages["fit"].seconds(plan.config)
    assert fit == pytest.approx(480 / 100 + 480 / 50 + 12 * 0.5)
    # each reading on 4 documents, and each step of 3, loads their states
    read = (judged * 4 + 4 * 3) * state
    assert plan.stages["calibrate"].read_bytes == whole.read_bytes == read
    calibrate = plan.stages["calibrate"].seconds(plan.config)
    assert calibrate == pytest.approx(320 / 100 + (350 + 96 + 3 * 36) / 50 + (32 + 2 * 4) * 0.5 + read / 1000)


def test_states_take_what_the_plan_says_wherever_they_are_kept(config: SuiteConfig, tmp_path: Path) -> None:
    """On the disk, on the device, or read again by the source: against the files and tensors that are there."""
    pair, ids = tiny_pair.pair(), torch.arange(10 * 35).reshape(10, 35) % 250
    windows = [TokenWindow(str(n), row) for n, row in enumerate(ids)]
    bridge = Bridge.direct(pair.source_identity, pair.receiver_identity)
    found = {}
    for states in ("disk", "device", "recompute"):
        settings = dataclasses.replace(config.calibrate, states=states)
        plan = dry_run(dataclasses.replace(config, calibrate=settings), "all").stages["calibrate"]
        splits = {"fit": windows[:6], "validation": windows[6:]}
        documents = CalibrationDocuments(pair, bridge, splits, settings, tmp_path / states)  # type: ignore[arg-type]
        documents.prepare(lambda *_: None)
        held = sum(sum(state.nbytes().values()) for state in documents._held.values())
        files = sum(
            sum(
                tensor.nbytes
                for name, tensor in load_file(path).items()
                if not name.startswith("bookkeeping")
            )
            for path in (tmp_path / states).iterdir()
        )
        found[states] = (plan, held, files)
    least = found["recompute"][0]
    for states, (plan, held, files) in found.items():
        assert plan.device_bytes - least.device_bytes == held, states
        assert plan.disk_bytes == files, states
        assert bool(plan.read_bytes) == (states == "disk"), states
        assert bool(held) == (states == "device"), states
    # 8 readings of 4 documents in 2 passes each, and 4 steps of 3 documents in one pass each, by the source too
    disk = found["disk"][0]
    assert disk.source_tokens == found["device"][0].source_tokens == 10 * 32
    assert least.source_tokens - disk.source_tokens == (8 * 4 + 4 * 3) * 32
    assert least.source_passes - disk.source_passes == 8 * 2 + 4


def test_one_model_at_a_time_holds_the_larger_one(config: SuiteConfig) -> None:
    models = dataclasses.replace(config.models, load="sequential")
    together, turns = (
        dry_run(found, "e001").stages["restore"].device_bytes
        for found in (config, dataclasses.replace(config, models=models))
    )
    assert together - turns == size_of(config.models.source, "float32").weight_bytes


def test_a_dry_run_says_what_it_does_not_know(config: SuiteConfig) -> None:
    plan = dry_run(config, "e001")
    assert list(plan.stages) == ["documents", "restore", "fit", "e001"]
    assert plan.held()[-1][-1] == "unknown"
    assert any("throughput.source" in note for note in plan.notes())
    assert plan.as_dict()["total"]["seconds"] is None
