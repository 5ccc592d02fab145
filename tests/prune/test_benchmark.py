"""Tasks whose truth is what they claim, scores by hand, arms at equal budgets, and the run from end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from experiments.prune_benchmark import plot, run, summary
from statebridge.cli.prune import prune
from statebridge.cli.worlds import worlds
from statebridge.errors import ConfigError, PruneError, StateFileError
from statebridge.prune import DeCoPrune, Full
from statebridge.prune.adapters.small_world import SmallWorld
from statebridge.prune.benchmark import tasks as room
from statebridge.prune.benchmark.arms import (
    Arm,
    continuation_speed,
    run_arm,
    split_heads,
    streaming_at,
    thresholds,
)
from statebridge.prune.benchmark.scores import boxes_of, dino_score, psnr, score, ssim
from statebridge.prune.benchmark.tasks import LOOK, Tasks, make_tasks
from statebridge.stats import Bootstrap, Interval, ScoreTable, difference
from statebridge.worlds import Rotary, WorldConfig, WorldModel
from statebridge.worlds.render import render
from statebridge.worlds.weights import load_world, save_world

APP = typer.Typer()
APP.command()(prune)


@pytest.fixture(autouse=True)
def few_scenes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_RENDERED", 2)


@pytest.fixture(scope="module")
def tasks() -> Tasks:
    return make_tasks(4, seed=40, context=48)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    torch.manual_seed(0)
    model = WorldModel(WorldConfig(width=24, layers=1, heads=2, expansion=1, rotary=Rotary(pairs=(2, 2, 2))))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    save_world(folder, model, {"steps": 0})
    return folder


@pytest.fixture(scope="module")
def backbone(world: Path) -> SmallWorld:
    return SmallWorld(load_world(world))


def test_the_view_that_comes_back_is_one_that_was_seen(tasks: Tasks) -> None:
    last, look = tasks.frames[:, -1], tasks.frames[:, LOOK]
    # the same pose up to float32 sums of steps, so but few pixels at edges differ
    assert ((last - look).abs().amax(1) > 0.02).float().mean() < 0.01
    torch.testing.assert_close(tasks.poses[:, -1], tasks.poses[:, LOOK], atol=1e-5, rtol=0)
    assert ((last - tasks.frames[:, 0]).abs().amax(1) > 0.02).float().mean() > 0.3


def test_both_kinds_alternate_and_revisits_move(tasks: Tasks) -> None:
    assert tasks.kinds.tolist() == [0, 1, 0, 1]
    moved = (tasks.poses[:, :, :2].abs().amax((1, 2)) > 0.1).tolist()
    assert moved == [False, True, False, True]


def test_the_target_shows_itself_only_in_the_two_looks() -> None:
    shown: list[torch.Tensor] = []

    def spy(scene, poses):  # type: ignore[no-untyped-def]
        result = render(scene, poses)
        shown.append(result.labels)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, "render", spy)
        made = make_tasks(2, seed=60, context=64)
    labels = torch.cat(shown)
    for row in range(2):
        target = made.target[row, -1]
        # the scene of this task is the one whose last frame shows the target where the task says
        (index,) = [
            i for i in range(len(labels))
            if any(torch.equal(labels[i, -1] == k, target) for k in range(8))
        ][:1]  # fmt: skip
        number = int(labels[index, -1][target][0])
        visible = (labels[index] == number).flatten(1).any(1)
        assert visible[LOOK]
        assert not visible[:8].any()
        assert not visible[28:64].any()


def test_tasks_are_a_function_of_their_seed(tasks: Tasks) -> None:
    again = make_tasks(2, seed=40, context=48)
    assert again.names[0] == tasks.names[0]
    assert torch.equal(again.frames[0], tasks.frames[0])
    with pytest.raises(PruneError, match="too short"):
        make_tasks(1, seed=0, context=32)


def test_boxes_bound_their_masks() -> None:
    mask = torch.zeros(1, 2, 5, 5, dtype=torch.bool)
    mask[0, 0, 1, 3] = mask[0, 0, 3, 2] = True
    box = boxes_of(mask)
    assert box[0, 0].nonzero().tolist() == [[r, c] for r in (1, 2, 3) for c in (2, 3)]
    assert not box[0, 1].any()


def test_scores_look_into_the_box_and_at_the_view() -> None:
    truth = torch.zeros(1, 1, 3, 16, 16)
    target = torch.zeros(1, 1, 16, 16, dtype=torch.bool)
    target[0, 0, 4:10, 4:10] = True
    wrong = truth.clone()
    wrong[..., 4:10, 4:7] = 0.5  # half of the box is off by 0.25 on the scale of [0, 1]
    found = score(wrong, truth, target)
    assert found["target_mse"][0] == pytest.approx(0.25**2 / 2)
    assert found["view_mse"][0] == pytest.approx(0.25**2 * 18 / 256)
    assert found["target_missed"][0] == pytest.approx(0.5)
    assert found["target_dissimilarity"][0] > 0.01
    assert score(truth, truth, target)["target_dissimilarity"][0] == pytest.approx(0, abs=1e-6)
    assert psnr(0.01) == pytest.approx(20.0)
    with pytest.raises(PruneError, match="never shows"):
        score(truth, truth, torch.zeros_like(target))


def test_frames_that_are_no_numbers_get_no_score() -> None:
    target = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    made = torch.zeros(1, 1, 3, 8, 8)
    made[0, 0, 1, 2, 3] = torch.nan  # compares with nothing, so no pixel of the target would count as missed
    with pytest.raises(PruneError, match="Task 0 was drawn with values that are no numbers"):
        score(made, torch.zeros_like(made), target)


def test_ssim_of_a_picture_and_its_negative_is_negative() -> None:
    picture = torch.rand(1, 1, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    assert ssim(picture, picture).min() == pytest.approx(1, abs=1e-5)
    assert ssim(picture, 1 - picture).mean() < -0.5


def test_streaming_at_a_budget_shows_as_many_positions() -> None:
    policy = streaming_at(0.4, chunks=60, sink=1, window=4)
    wanted = sum(min(i, 5) + 0.4 * max(0, i - 5) for i in range(60))
    shown = [
        sum(min(i, 1 + w) for i in range(60)) for w in (policy.window - 1, policy.window, policy.window + 1)
    ]
    assert abs(shown[1] - wanted) <= min(abs(shown[0] - wanted), abs(shown[2] - wanted))
    assert streaming_at(0.0, 60, 1, 4).window == 4


def test_batches_do_not_change_what_full_kv_observes(backbone: SmallWorld, tasks: Tasks) -> None:
    result = run_arm(backbone, tasks, Arm("full", Full()), batch=4)
    assert result.frames.shape == (4, 12, 3, 64, 64)
    assert result.pr == 0
    halves = run_arm(backbone, tasks, Arm("full", Full()), batch=2)
    assert halves.cache_bytes == result.cache_bytes


def test_the_threshold_of_a_share_keeps_that_share(backbone: SmallWorld, tasks: Tasks) -> None:
    guide = run_arm(backbone, tasks, Arm("guide", DeCoPrune(keep_ratio=0.3)), batch=4, keep_scores=True)
    assert guide.scores is not None
    assert guide.scores.shape == (11, 4, 256)
    low, high = thresholds(guide.scores, (0.5, 0.1))
    assert low < high
    assert (guide.scores > high).double().mean() == pytest.approx(0.1, abs=0.001)


def test_thresholds_count_and_do_not_interpolate() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0, torch.inf]])
    assert thresholds(scores, (0.0, 0.25, 0.5, 1.0)) == [float("inf"), 3.0, 2.0, -float("inf")]


def test_dino_tells_crops_apart(tmp_path: Path) -> None:
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    shape = Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    Dinov2Model(shape).save_pretrained(tmp_path)
    distance = dino_score(tmp_path, "cpu")
    truth = torch.rand(1, 1, 3, 16, 16, generator=torch.Generator().manual_seed(1)) * 2 - 1
    target = torch.zeros(1, 1, 16, 16, dtype=torch.bool)
    target[..., 4:12, 2:9] = True
    outside = torch.where(target[:, :, None], truth, -truth)
    inside = torch.where(target[:, :, None], -truth, truth)
    same, other = distance(outside, truth, target)[0], distance(inside, truth, target)[0]
    assert same == pytest.approx(0, abs=1e-5)
    assert other > 1e-3
    with pytest.raises(PruneError, match="no DINOv2 model"):
        dino_score(tmp_path / "nothing", "cpu")


def test_speed_is_measured_from_one_history(backbone: SmallWorld, tasks: Tasks) -> None:
    speed = continuation_speed(backbone, tasks, Arm("x", DeCoPrune(keep_ratio=0.1)), rows=2, repeats=3)
    assert speed.spread[0] <= speed.seconds <= speed.spread[1]


def test_heads_are_split_on_tasks(backbone: SmallWorld, tasks: Tasks) -> None:
    split = split_heads(backbone, tasks, sink=1, window=2, share=0.5)
    assert sum(map(sum, split.dynamic)) == 1


@pytest.mark.slow
def test_the_benchmark_runs_resumes_and_reports(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller = run.dataclasses.replace(
        run.SMOKE, validation=2, test=2, context=40, batch=2, ratios=(0.2,), main=0.2
    )
    monkeypatch.setattr(run, "SMOKE", smaller)
    command = ["run", "--world", str(world), "--folder", str(tmp_path), "--smoke", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*command, "--seconds", "0"])
    with pytest.raises(SystemExit, match="start the run again"):
        run.main()
    monkeypatch.setattr(sys, "argv", command)
    run.main()
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "test").iterdir()}
    run.main()  # everything is there already
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "test").iterdir()} == stamps
    result = summary.summarise(tmp_path)
    monkeypatch.setattr(sys, "argv", ["summary", "--folder", str(tmp_path)])
    summary.main()
    assert json.loads((tmp_path / "result.json").read_text()) == result
    kept = json.loads((tmp_path / "scores.json").read_text())
    assert len(kept["scores"]["target_mse"][f"full{result['suffix']}"]) == len(kept["tasks"]) == 2
    verdicts = {row["rival"]: row["verdict"] for row in result["order"]["target_mse"] if row["published"]}
    assert set(verdicts) == set(summary.PUBLISHED)
    rows = {row["arm"]: row for row in result["arms"]}
    each = [
        rows[f"{name}@0.2-each{result['suffix']}"]["pr"] for name in ("decoprune", "reversed_discrepancy")
    ]
    assert each == [rows[f"random@0.2{result['suffix']}"]["pr"]] * 2
    pooled = rows[f"decoprune@0.2{result['suffix']}"]["pr"]  # a threshold from other tasks: near, not equal
    assert pooled == pytest.approx(each[0], abs=0.05)
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- results -->\nstale words\n<!-- /results -->\nafter\n")
    monkeypatch.setattr(sys, "argv", ["plot", "--folder", str(tmp_path), "--readme", str(page)])
    plot.main()
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "curves.png",
        "differences.png",
        "reindexing.png",
        "strips.png",
    }
    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "stale words" not in text
    assert "| DeCoPrune@0.2 |" in text
    assert text.index("| DeCoPrune@0.2 |") < text.index("<details>")


def test_the_page_says_what_the_results_hold() -> None:
    folder = Path(plot.__file__).parent
    result = json.loads((folder / "results" / "result.json").read_text())
    kept = json.loads((folder / "results" / "scores.json").read_text())
    assert plot.tables(result) in (folder / "README.md").read_text()
    assert result["chosen"] == json.loads((folder / "results" / "chosen.json").read_text())
    for row in result["arms"]:
        for name, scores in kept["scores"].items():
            # kept to six digits
            assert np.mean(scores[row["arm"]]) == pytest.approx(row[name]["estimate"], rel=1e-5, abs=1e-9)
    table = ScoreTable.from_columns(kept["tasks"], kept["scores"]["target_mse"])
    headline = result["order"]["target_mse"]
    (row,) = (r for r in headline if r["ratio"] == result["main"] and r["rival"] == "random"
              and r["ours"] == "decoprune" and r["each"])  # fmt: skip
    arms = (f"decoprune@0.1-each{result['suffix']}", f"random@0.1{result['suffix']}")
    again = difference(table, *arms, Bootstrap(seed=0))
    assert again.low == pytest.approx(row["difference"]["low"], abs=1e-6)
    assert again.high == pytest.approx(row["difference"]["high"], abs=1e-6)


def test_verdicts_follow_the_interval() -> None:
    def interval(low: float, high: float) -> Interval:
        return Interval((low + high) / 2, low, high, 0.95, 9, 10, 0)

    found = [summary._verdict(interval(*ends)) for ends in ((-2, -1), (1, 2), (-1, 1))]
    assert found == ["holds", "turned round", "open"]


def test_the_verb_prints_policies_beside_full_kv(world: Path, tmp_path: Path) -> None:
    options = ["decoprune", "--world", str(world), "--tasks", "1", "--context", "40", "--format", "json"]
    result = CliRunner().invoke(APP, [*options, "--out", str(tmp_path / "a" / "s.png")])
    assert result.exit_code == 0, result.exception
    told = json.loads(result.stdout)
    assert [row["policy"] for row in told["policies"]] == ["full", "decoprune"]
    assert told["policies"][0]["pr"] == 0 < told["policies"][1]["pr"]
    assert told["policies"][1]["cache_bytes"] < told["policies"][0]["cache_bytes"]
    assert (tmp_path / "a" / "s.png").read_bytes().startswith(b"\x89PNG")
    table = CliRunner().invoke(APP, [*options[:-2]])
    assert "decoprune" in table.stdout


def test_the_verb_refuses_what_is_wrong(world: Path, tmp_path: Path) -> None:
    for options, error, reason in (
        (["nothing"], PruneError, "There is no policy 'nothing'"),
        (["decoprune", "--window", "0"], PruneError, "smaller than a chunk"),
        (["decoprune", "--probe-step", "9"], PruneError, "outside the schedule"),
        (["decoprune", "--threshold", "1", "--keep-ratio", "0.1"], PruneError, "not both"),
    ):
        result = CliRunner().invoke(APP, [*options, "--world", str(world), "--tasks", "1", "--context", "36"])
        assert isinstance(result.exception, error)
        assert reason in str(result.exception)
    (tmp_path / "file").touch()
    for options, reason in (
        (["--world", str(tmp_path)], "There is no world model"),
        (["--world", str(world), "--device", "nowhere"], "nowhere"),
        (["--world", str(world), "--out", str(tmp_path / "file" / "s.png")], "cannot be written"),
    ):
        result = CliRunner().invoke(APP, ["decoprune", *options])
        assert isinstance(result.exception, ConfigError)
        assert reason in str(result.exception)


@pytest.mark.parametrize("damage", [torch.nan, torch.inf])
def test_a_world_with_weights_that_are_no_numbers_is_refused(
    world: Path, tmp_path: Path, damage: float
) -> None:
    model = load_world(world)
    model.blocks[0].k_scale[0] = damage
    save_world(tmp_path, model, {"steps": 0})
    result = CliRunner().invoke(APP, ["full", "--world", str(tmp_path), "--tasks", "1", "--context", "36"])
    assert isinstance(result.exception, StateFileError)
    assert "blocks.0.k_scale" in str(result.exception)


def test_the_demo_saves_a_strip(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.png"
    options = [
        "demo",
        "--world",
        str(world),
        "--tasks",
        "1",
        "--context",
        "40",
        "--out",
        str(out),
        "--device",
        "auto",
    ]
    result = CliRunner().invoke(worlds, [*options, "--format", "json"])
    assert result.exit_code == 0, result.exception
    told = json.loads(result.stdout)
    assert set(told["arms"]) == {"all history", "latest chunk"}
    assert out.read_bytes().startswith(b"\x89PNG")
    assert np.isfinite(list(told["arms"]["all history"].values())).all()
