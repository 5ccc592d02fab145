"""Run every policy over the tasks, on one GPU in a few minutes or, with --smoke, on a CPU.

Each arm leaves one file in the folder of the run as soon as it is done, so an interrupted run is started again
and goes on; --seconds stops it between two arms. Thresholds, γ, dynamic heads, and whether to re-index are chosen
on the validation tasks and written down before any test task is run. `summary.py` makes result.json
from the files, `plot.py` the report.

    python -m experiments.prune_benchmark.run --world checkpoints/world --folder runs/prune
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.prune_benchmark.config import FIRST_SEED, SMOKE, BenchmarkConfig
from experiments.prune_benchmark.work import OutOfTime, Run, made_folder
from statebridge.prune import (
    DeCoPrune,
    DeCoPruneHS,
    Full,
    HeadSplit,
    Policy,
    Random,
    ReversedDiscrepancy,
    ScoredPolicy,
    Streaming,
    TemporalDifference,
)
from statebridge.prune.adapters.small_world import SmallWorld
from statebridge.prune.benchmark.arms import (
    Arm,
    continuation_speed,
    split_heads,
    streaming_at,
)
from statebridge.prune.benchmark.scores import dino_score
from statebridge.prune.benchmark.strips import as_bytes
from statebridge.prune.benchmark.tasks import LOOK, make_tasks
from statebridge.worlds.weights import load_world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=Path, required=True, help="folder of a world model")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the run")
    parser.add_argument("--smoke", action="store_true", help="a few short tasks, on a CPU")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop between two arms after this long"
    )
    parser.add_argument("--dino", type=Path, help="folder of a DINOv2 model, for one more score")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32")
    args = parser.parse_args()
    config = SMOKE if args.smoke else BenchmarkConfig()
    begun = time.perf_counter()
    backbone = SmallWorld(load_world(args.world, args.device, getattr(torch, args.dtype)))
    # two calls, so that the number of test tasks never changes which validation tasks there are
    validation = make_tasks(config.validation, FIRST_SEED, config.context, args.device)
    test = make_tasks(config.test, FIRST_SEED + 1_000_000, config.context, args.device)
    dino = dino_score(args.dino, args.device) if args.dino else None
    run = Run(args.folder, config, backbone, validation, test, begun + args.seconds, dino)
    print(f"{len(validation)} + {len(test)} tasks in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    try:
        chosen = choose(run)
        report(run, chosen)
        speed(run, chosen)
    except OutOfTime:
        sys.exit("time is over; start the run again to go on")
    about = {
        "config": dataclasses.asdict(config),
        "world": json.loads((args.world / "config.json").read_text(encoding="utf-8"))["training"],
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "dtype": args.dtype,
        "torch": torch.__version__,
    }
    truth = as_bytes(test.truth[: config.strips])
    judged = test.truth.shape[1]
    spread = torch.linspace(LOOK + 4, config.context - 1, judged - 1).long()
    context = as_bytes(test.frames[: config.strips, [LOOK, *spread.tolist()]])  # the early look comes first
    np.savez_compressed(made_folder(args.folder / "frames" / "truth.npz"), frames=truth, context=context)
    run.write("about", about)


def choose(run: Run) -> dict[str, Any]:
    """Choose on the validation tasks: re-indexing, the head split, thresholds, γ."""
    path = run.folder / "chosen.json"
    if path.exists():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    c = run.config
    errors = {
        how is not None: _error(
            run.arm(Arm(_suffixed("full", how), Full(c.sink, c.window), how), validation=True)
        )
        for how in (None, c.reindex)
    }
    reindex = c.reindex if errors[True] < errors[False] else None
    split = split_heads(run.backbone, run.validation, c.sink, c.window, c.share)
    found: dict[str, float] = {}
    tried = []
    for ratio in c.ratios:
        for kind in (TemporalDifference, ReversedDiscrepancy, DeCoPrune):
            found[f"{kind.name}@{ratio}"] = run.threshold(kind, ratio, reindex)
        if ratio <= split.share:
            found[f"decoprune_hs@{ratio}"] = run.threshold(DeCoPruneHS, ratio, reindex, split=split)
        name = f"decoprune@{ratio}"
        policy = DeCoPrune(c.sink, c.window, threshold=found[name])
        done = run.arm(Arm(_suffixed(name, reindex), policy, reindex), validation=True)
        tried.append({"ratio": ratio, "gamma": found[name], "target_mse": _error(done), "pr": done["pr"]})
    allowed = [t for t in tried if t["target_mse"] <= c.gamma_slack * errors[reindex is not None]]
    # with none good enough, the best one is taken and said to be no better than that
    gamma = max(allowed, key=lambda t: t["gamma"]) if allowed else min(tried, key=lambda t: t["target_mse"])
    chosen = {
        "reindexed": reindex is not None,
        "full_target_mse": {"plain": errors[False], "reindexed": errors[True]},
        "dynamic": split.dynamic,
        "thresholds": found,
        "gamma": gamma["gamma"],
        "gamma_ratio": gamma["ratio"],
        "gamma_within_slack": bool(allowed),
        "gamma_tried": tried,
    }
    run.write("chosen", chosen)
    return chosen


def policies(run: Run, chosen: dict[str, Any], ratio: float, each: bool = False) -> dict[str, Policy]:
    """Return the policies at one budget, by name: over all chunks together, or the same in each chunk."""
    c, split = run.config, HeadSplit(tuple(map(tuple, chosen["dynamic"])))
    chunks = c.context // run.backbone.model.config.grid.frames
    made: dict[str, Policy] = {}
    kinds: list[type[ScoredPolicy]] = [DeCoPrune, TemporalDifference, ReversedDiscrepancy]
    if ratio <= split.share:
        kinds.append(DeCoPruneHS)
    for kind in kinds:
        more: dict[str, Any] = {"split": split} if kind is DeCoPruneHS else {}
        name = f"{kind.name}@{ratio}"
        budget = {"keep_ratio": ratio} if each else {"threshold": chosen["thresholds"][name]}
        made[f"{name}-each" if each else name] = kind(c.sink, c.window, **budget, **more)
    if not each:
        made[f"random@{ratio}"] = Random(c.sink, c.window, keep_ratio=ratio)
        made[f"streaming@{ratio}"] = streaming_at(ratio, chunks, c.sink, c.window)
    return made


def report(run: Run, chosen: dict[str, Any]) -> None:
    """Run all arms on the test tasks: first what the headline needs, then the curves, then re-indexing."""
    c = run.config
    here, other = (c.reindex, None) if chosen["reindexed"] else (None, c.reindex)
    plain = {"full": Full(c.sink, c.window), "streaming": Streaming(c.sink, c.window)}
    headline = plain | policies(run, chosen, c.main)
    curves = policies(run, chosen, c.main, each=True)
    for ratio in c.ratios:
        curves |= policies(run, chosen, ratio) if ratio != c.main else {}
    for reindex, arms in ((here, headline), (here, curves), (other, headline)):
        for name, policy in arms.items():
            run.arm(Arm(_suffixed(name, reindex), policy, reindex))


def speed(run: Run, chosen: dict[str, Any]) -> None:
    """Time the continuation under a few policies, and the peak memory meanwhile."""
    c = run.config
    reindex = c.reindex if chosen["reindexed"] else None
    arms: dict[str, Policy] = {"full": Full(c.sink, c.window), "streaming": Streaming(c.sink, c.window)}
    for ratio in dict.fromkeys((c.main, chosen["gamma_ratio"])):
        made = policies(run, chosen, ratio)
        arms |= {name: made[name] for name in (f"decoprune@{ratio}", f"decoprune_hs@{ratio}") if name in made}
    for rows in c.speed_rows:
        for name, policy in arms.items():
            path = f"speed/{name}-{rows}"
            if (run.folder / f"{path}.json").exists():
                continue
            run.check_time()
            found = continuation_speed(
                run.backbone, run.test, Arm(name, policy, reindex), rows=rows, repeats=c.speed_repeats
            )
            run.write(path, {"arm": name, "rows": rows, **dataclasses.asdict(found)})
            print(f"{path:44s} {found.seconds * 1e3:.1f} ms", file=sys.stderr, flush=True)


def _error(content: dict[str, Any]) -> float:
    return float(np.mean(content["scores"]["target_mse"]))


def _suffixed(name: str, reindex: Any) -> str:
    return name if reindex is None else f"{name}+reindex"


if __name__ == "__main__":
    main()
