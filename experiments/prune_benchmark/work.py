"""The folder of a run: an arm or a threshold that has its file there is not computed again."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from experiments.prune_benchmark.config import BenchmarkConfig
from statebridge.prune import Reindex, ScoredPolicy
from statebridge.prune.adapters.small_world import SmallWorld
from statebridge.prune.benchmark.arms import Arm, ArmResult, run_arm, thresholds
from statebridge.prune.benchmark.scores import score
from statebridge.prune.benchmark.strips import as_bytes
from statebridge.prune.benchmark.tasks import Tasks
from statebridge.state.atomic import atomic_file


class OutOfTime(Exception):
    """The run stops here and goes on when it is started again."""


@dataclasses.dataclass
class Run:
    """A folder, the model, the tasks, and the time that is left."""

    folder: Path
    config: BenchmarkConfig
    backbone: SmallWorld
    validation: Tasks
    test: Tasks
    deadline: float
    dino: Any = None

    def arm(self, arm: Arm, *, validation: bool = False) -> dict[str, Any]:
        """Run an arm unless its file is there already; returns what the file says."""
        name = f"{'validation' if validation else 'test'}/{arm.name}"
        path = self.folder / f"{name}.json"
        if path.exists():
            return dict(json.loads(path.read_text(encoding="utf-8")))
        self.check_time()
        tasks, begun = self.validation if validation else self.test, time.perf_counter()
        made = self._run(tasks, arm)
        truth, target = tasks.truth.cpu(), tasks.target.cpu()
        scores = score(made.frames, truth, target)
        if self.dino is not None:
            scores["target_dino"] = self.dino(made.frames, truth, target)
        content = {
            "arm": arm.name,
            "policy": arm.policy.name,
            "settings": repr(arm.policy),
            "reindexed": arm.reindex is not None,
            "tasks": tasks.names,
            "scores": {key: values.tolist() for key, values in scores.items()},
            "pr": made.pr,
            "pr_generated": made.pr_generated,
            "cache_bytes": made.cache_bytes,
            "peak_bytes": made.peak_bytes,
            "seconds": time.perf_counter() - begun,
        }
        if not validation:
            frames = made.frames[: self.config.strips]
            np.savez_compressed(
                made_folder(self.folder / "frames" / f"{arm.name}.npz"), frames=as_bytes(frames)
            )
        self.write(name, content)
        print(
            f"{name:44s} PR {made.pr:.3f}  target mse {scores['target_mse'].mean():.4f}  "
            f"view mse {scores['view_mse'].mean():.4f}  {content['seconds']:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        return content

    def threshold(
        self, kind: type[ScoredPolicy], ratio: float, reindex: Reindex | None, **more: Any
    ) -> float:
        """Return the threshold at which a policy keeps `ratio` of what leaves the window, over all chunks together.

        Scores depend on what was kept before, so the first threshold, from scores under a fixed budget a chunk, is
        corrected once by the scores that it leads to itself.
        """
        path = self.folder / "thresholds" / f"{kind.name}@{ratio}.json"
        if path.exists():
            return float(json.loads(path.read_text(encoding="utf-8"))["threshold"])
        self.check_time()
        c, rows = self.config, self.validation.rows(slice(0, self.config.calibration))
        policy = kind(c.sink, c.window, keep_ratio=ratio, **more)
        share = policy.budget
        assert share is not None
        found: list[float] = []
        for _ in range(2 if kind.probes else 1):  # without a probe, scores depend on the pictures alone
            made = self._run(rows, Arm("calibration", policy, reindex), keep_scores=True)
            assert made.scores is not None
            found += thresholds(made.scores, (share,))
            policy = kind(c.sink, c.window, threshold=found[-1], **more)
        self.write(f"thresholds/{path.stem}", {"threshold": found[-1], "tried": found})
        return found[-1]

    def _run(self, tasks: Tasks, arm: Arm, keep_scores: bool = False) -> ArmResult:
        c = self.config
        return run_arm(
            self.backbone,
            tasks,
            arm,
            batch=c.batch,
            seed=c.seed,
            probe_step=c.probe_step,
            keep_scores=keep_scores,
        )

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file of the run."""
        with atomic_file(made_folder(self.folder / f"{name}.json")) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def check_time(self) -> None:
        """Stop when the time is over."""
        if time.perf_counter() > self.deadline:
            raise OutOfTime


def made_folder(path: Path) -> Path:
    """Return the path, with its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
