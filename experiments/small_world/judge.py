"""Judge a world model by number and give strips to look at.

Roll-outs: a few chunks are observed, the next ones are made; PSNR against the truth by frame ahead, beside the
last observed frame repeated. Return: stand, turn away by 180 degrees and back; only standing is observed (or, in
a second version, turning away too). The view after the return is compared with the view before, once with all
history and once with only the latest chunk, over the same worlds and noise; intervals are paired over worlds.

    python -m experiments.small_world.judge checkpoints/world --out runs/world_judged
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from experiments.small_world.data import HELD_OUT
from statebridge.stats import Bootstrap, Interval, mean
from statebridge.worlds import Conditioning, Sampler, WorldModel
from statebridge.worlds.motion import STAY, relative, walk
from statebridge.worlds.render import render
from statebridge.worlds.rollout import Remember, everything, generate, last_chunks, observe
from statebridge.worlds.scene import make_scenes, start_poses
from statebridge.worlds.trajectories import draw_actions, look_away_and_back
from statebridge.worlds.weights import load_world

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Tensor = torch.Tensor

_ROLLOUT_SEEDS, _RETURN_SEEDS = HELD_OUT + 10_000_000, HELD_OUT + 20_000_000
_BATCH = 64


@dataclasses.dataclass(frozen=True)
class Walked:
    """Worlds walked through, and what was seen."""

    frames: Tensor  # [N, T, 3, size, size]
    conditioning: Conditioning

    def rows(self, start: int, stop: int) -> Walked:
        c = self.conditioning
        part = Conditioning(c.actions[start:stop], c.poses[start:stop], c.times[start:stop])
        return Walked(self.frames[start:stop], part)


def walked(model: WorldModel, seeds: Tensor, actions: Tensor) -> Walked:
    """Walk through the worlds of these seeds [N] by actions [N, T]."""
    scenes = make_scenes(seeds)
    poses = walk(scenes, start_poses(scenes), actions)
    times = torch.arange(actions.shape[1], device=seeds.device, dtype=torch.float32).expand(actions.shape)
    seen = render(scenes, poses, model.config.camera).frames
    return Walked(seen, Conditioning(actions, relative(poses, poses[:, 0]), times))


def continued(model: WorldModel, worlds: Walked, observed: int, remember: Remember, seed: int) -> Tensor:
    """Frames made after the first `observed` ones, [N, T - observed, 3, size, size], by batches."""
    made = []
    for start in range(0, len(worlds.frames), _BATCH):
        part = worlds.rows(start, start + _BATCH)
        B, T = part.conditioning.actions.shape
        generator = torch.Generator().manual_seed(seed + start)
        before, after = part.conditioning.frames(0, observed), part.conditioning.frames(observed, T)
        cache = observe(model, model.empty_cache(B), part.frames[:, :observed], before, remember)
        made.append(generate(model, cache, after, generator, Sampler(), remember).frames)
    return torch.cat(made)


def error(a: Tensor, b: Tensor) -> Tensor:
    """Mean squared error of frames [..., 3, size, size] on a scale from 0 to 1."""
    return ((a - b) / 2).square().mean(dim=(-1, -2, -3))


def psnr(squared: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in decibels."""
    return -10 * squared.clamp_min(1e-8).log10()


def judge_rollouts(model: WorldModel, worlds: int, observed: int, ahead: int, folder: Path) -> dict[str, Any]:
    """PSNR by frame ahead over walks like those of training."""
    seeds = torch.arange(_ROLLOUT_SEEDS, _ROLLOUT_SEEDS + worlds, device=model.device)
    truth = walked(model, seeds, draw_actions(seeds, observed + ahead))
    made = continued(model, truth, observed, everything, 0)
    later = truth.frames[:, observed:]
    still = truth.frames[:, observed - 1 : observed].expand_as(later)
    model_psnr, still_psnr = psnr(error(made, later)), psnr(error(still, later))
    _strip(
        folder / "rollouts.png",
        {"truth": truth.frames[:3], "model": torch.cat([truth.frames[:3, :observed], made[:3]], dim=1)},
        observed,
    )
    return {
        "worlds": worlds,
        "observed_frames": observed,
        "psnr_by_frame": [round(x, 3) for x in model_psnr.mean(0).tolist()],
        "psnr_of_last_frame_repeated": [round(x, 3) for x in still_psnr.mean(0).tolist()],
        "psnr_gain": _interval((model_psnr - still_psnr).mean(1)),
    }


def judge_return(model: WorldModel, worlds: int, observed: int, folder: Path) -> dict[str, Any]:
    """Error of the view after turning away and back, with all history and with the latest chunk alone."""
    F = model.config.grid.frames
    seeds = torch.arange(_RETURN_SEEDS, _RETURN_SEEDS + worlds, device=model.device)
    turns = [look_away_and_back(8, left=left) for left in (True, False)]
    actions = [[STAY] * F + turns[i % 2] for i in range(worlds)]
    truth = walked(model, seeds, torch.tensor(actions, device=model.device))
    arms = {"history": everything, "removed": last_chunks(1)}
    made = {name: continued(model, truth, observed, remember, 1) for name, remember in arms.items()}
    anchor = truth.frames[:, F - 1]
    squared = {name: error(frames[:, -1], anchor) for name, frames in made.items()}
    rows = {"truth": truth.frames[:3]}
    for name, frames in made.items():
        rows[name] = torch.cat([truth.frames[:3, :observed], frames[:3]], dim=1)
    _strip(folder / f"return_{observed}.png", rows, observed)
    return {
        "worlds": worlds,
        "observed_frames": observed,
        "psnr": {name: _interval(psnr(x)) for name, x in squared.items()},
        "psnr_gain": _interval(psnr(squared["history"]) - psnr(squared["removed"])),
        "squared_error": {name: _interval(x) for name, x in squared.items()},
        "squared_error_difference": _interval(squared["history"] - squared["removed"]),
        "worlds_better": int((squared["history"] < squared["removed"]).sum()),
    }


def _interval(values: Tensor) -> dict[str, float]:
    found: Interval = Bootstrap(seed=0)(mean, values.double().cpu().numpy())
    return {"estimate": found.estimate, "low": found.low, "high": found.high, "n": found.n}


def _strip(path: Path, rows: Mapping[str, Tensor], observed: int) -> None:
    """Frames in a row per name, one block a world; what was made has a line above it."""
    names, worlds = list(rows), len(next(iter(rows.values())))
    gap, size = 6, next(iter(rows.values())).shape[-1]
    blocks = []
    for world in range(worlds):
        for name in names:
            frames = (rows[name][world].float().cpu().clamp(-1, 1) + 1) / 2  # [T, 3, size, size]
            line = torch.ones(len(frames), 3, size + 3, size + 1)
            line[:, :, 3:, :-1] = frames
            if name != "truth":
                line[observed:, :, :2] = torch.tensor([0.85, 0.2, 0.1])[:, None, None]
            blocks.append(torch.cat(list(line), dim=2).permute(1, 2, 0))
        blocks.append(torch.ones(gap, *blocks[-1].shape[1:]))
    picture = torch.cat(blocks).numpy()
    figure = plt.figure(figsize=(picture.shape[1] / 100, picture.shape[0] / 100 + 0.2), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1 - 0.2 / (picture.shape[0] / 100 + 0.2)))
    axes.imshow(picture, interpolation="nearest", aspect="auto")
    axes.axis("off")
    figure.text(0.002, 0.998, " / ".join(names) + " (red: made by the model)", va="top", fontsize=9)
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Judge a world model by number, with strips to look at.")
    parser.add_argument("model", type=Path, help="folder with config.json and model.safetensors")
    parser.add_argument("--out", type=Path, default=Path("runs/world_judged"))
    parser.add_argument("--worlds", type=int, default=64)
    parser.add_argument("--ahead", type=int, default=16, help="frames to make in each roll-out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model, begin = load_world(options.model, options.device), time.monotonic()
    result = {
        "model": json.loads((options.model / "config.json").read_text(encoding="utf-8")),
        "rollouts": judge_rollouts(model, options.worlds, 16, options.ahead, options.out),
        "return_imagined": judge_return(model, options.worlds, 4, options.out),
        "return_observed": judge_return(model, options.worlds, 12, options.out),
        "device": options.device,
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    result["seconds"] = round(time.monotonic() - begin, 1)
    text = json.dumps(result, indent=1)
    (options.out / "judged.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
