"""A training run that was interrupted equals one that was not; what it draws depends on the step alone."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tiny_world import CONFIG

from experiments.small_world.config import Phase, TrainConfig
from experiments.small_world.data import HELD_OUT, Batches, sequences
from experiments.small_world.train import Run
from statebridge.worlds.weights import load_world

TRAIN = TrainConfig(model=CONFIG, phases=(Phase(0.5, 8, 2), Phase(0.5, 9, 1)), walk_chunks=14, warmup=2)
CPU = torch.device("cpu")


def _run(folder: Path, steps: int) -> Run:
    folder.mkdir(exist_ok=True)
    run = Run(TRAIN, folder, CPU)
    run.resume()
    run.steps = run.steps or steps
    return run


def test_interrupted_equals_uninterrupted(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", 4)
    whole.train(1e9, 0)
    for _ in range(4):  # every call takes a step, is out of time and saves
        part = _run(tmp_path / "parts", 4)
        part.train(0, 0)
    assert part.step == whole.step == 4
    for one, other in zip(part.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(one, other)  # bit-exact on one machine
    for one, other in zip(part.average, whole.average, strict=True):
        assert torch.equal(one, other)
    begin = Run(TRAIN, tmp_path, CPU)
    assert any(
        not torch.equal(a, b) for a, b in zip(begin.model.parameters(), whole.model.parameters(), strict=True)
    )
    lines = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert "validation" in lines[-1]
    shipped = load_world(tmp_path / "whole" / "model")
    for one, other in zip(shipped.parameters(), whole.average, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)  # stored as float16


def test_a_batch_depends_on_its_step_alone() -> None:
    phase = TRAIN.phases[0]
    ahead, direct = Batches(TRAIN, phase, 7, CPU), Batches(TRAIN, phase, 7, CPU)
    for step in (0, 5, 40):
        ahead.step(step)
    assert torch.equal(ahead.step(33).frames, direct.step(33).frames)
    assert not torch.equal(direct.step(33).frames, direct.step(34).frames)


def test_chunks_are_whole_and_in_order_of_time() -> None:
    seeds = torch.arange(HELD_OUT, HELD_OUT + 200)
    _, _, walked = sequences(TRAIN, 8, seeds)
    times = walked.times.view(200, 8, CONFIG.grid.frames)
    assert (times[..., 1:] - times[..., :-1] == 1).all()
    gaps = times[:, 1:, 0] - times[:, :-1, -1]
    assert (gaps >= 1).all()
    assert 0.2 < (gaps.amax(1) == 1).float().mean() < 0.8  # some walks have no gap
    assert times.amax() < TRAIN.walk_chunks * CONFIG.grid.frames
    assert (walked.poses[:, 0] == 0).all()
