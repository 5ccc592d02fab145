"""Draws result.json: error against pruning ratio, paired differences, re-indexing, speed, and strips of frames.

Writes PNG files beside result.json, and the tables into the README between its markers.

    python -m experiments.prune_benchmark.plot --folder runs/prune --readme experiments/prune_benchmark/README.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from experiments.prune_benchmark.summary import PUBLISHED
from statebridge.evaluate import palette
from statebridge.prune.benchmark.scores import psnr
from statebridge.prune.benchmark.strips import save_strips

COLOURS = {
    "full": palette.INK,
    "streaming": palette.MUTED,
    "random": palette.AMBER,
    "temporal_difference": "#b5651d",
    "reversed_discrepancy": palette.BAD,
    "decoprune": palette.GOOD,
    "decoprune_hs": palette.VIOLET,
}
NAMES = {
    "temporal_difference": "temporal difference",
    "reversed_discrepancy": "reversed",
    "decoprune": "DeCoPrune",
}
NAMES |= {"decoprune_hs": "DeCoPrune-HS", "full": "full KV"}
_BEGIN, _END = "<!-- results -->", "<!-- /results -->"


def curves(result: dict[str, Any], path: Path) -> None:
    """Error against PR, one line a policy: the target's PSNR, and paired differences to full KV."""
    rows = [row for row in result["arms"] if row["reindexed"] == bool(result["suffix"])]
    shown = {"target_mse": "target, PSNR in dB", "target_mse_minus_full": "target mse, minus full KV"}
    shown |= {"target_dissimilarity_minus_full": "target (1 − SSIM) / 2, minus full KV"}
    shown |= {"view_mse_minus_full": "view mse, minus full KV"}
    with palette.style():
        figure, axes = plt.subplots(1, 4, figsize=(16, 3.9), layout="constrained")
        for axis, (name, title) in zip(axes, shown.items(), strict=True):
            scale = psnr if name == "target_mse" else np.asarray
            for policy, colour in COLOURS.items():
                mine = sorted((r for r in rows if r["policy"] == policy and "-each" not in r["arm"]), key=_pr)
                y, low, high = (scale([r[name][key] for r in mine]) for key in ("estimate", "low", "high"))
                if policy == "full":
                    axis.axhline(y[0], color=colour, lw=1, ls="--", label=_label(policy))
                    continue
                x = [100 * r["pr"] for r in mine]
                axis.plot(x, y, "o-", color=colour, ms=3.5, lw=1.4, label=_label(policy))
                if (
                    name != "target_mse"
                ):  # tasks differ far more than policies do; only differences are paired
                    axis.fill_between(x, low, high, color=colour, alpha=0.12, lw=0)
            for row in rows:
                y, colour = scale(row[name]["estimate"]), COLOURS[row["policy"]]
                if "-each" in row["arm"]:
                    axis.plot(100 * row["pr"], y, "x", ms=6, color=colour)
                elif row["arm"].removesuffix("+reindex") == f"decoprune@{result['chosen']['gamma_ratio']}":
                    axis.plot(100 * row["pr"], y, "*", ms=11, color=colour)
            axis.set(xlabel="history KV that attention did not see, PR in %", title=title)
            axis.grid(True)
        axes[0].legend(loc="lower left")
        figure.suptitle(
            f"{result['tasks']} tasks; ★ the γ that validation chose, × the same budget in each chunk",
            fontsize=11,
        )
        palette.save(figure, path)


def differences(result: dict[str, Any], path: Path) -> None:
    """Paired differences at the main budget: DeCoPrune minus each rival."""
    with palette.style():
        figure, axes = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
        for axis, name in zip(axes, ("target_mse", "target_dissimilarity"), strict=True):
            rows = [r for r in result["order"][name] if r["ratio"] == result["main"]]
            for y, row in enumerate(reversed(rows)):
                d, colour = row["difference"], COLOURS[row["ours"]]
                axis.plot([d["low"], d["high"]], [y, y], color=colour, lw=2)
                axis.plot(d["estimate"], y, "o", color=colour, ms=5)
            labels = [
                f"{_label(r['ours'])} − {_label(r['rival'])}{', each' if r['each'] else ''}"
                for r in reversed(rows)
            ]
            axis.set_yticks(range(len(rows)), labels)
            axis.axvline(0, color=palette.INK, lw=0.8)
            axis.set_title(f"{name.replace('_', ' ')}, difference (left of 0: the first is better)")
            axis.grid(True, axis="x")
        palette.save(figure, path)


def reindexing(result: dict[str, Any], path: Path) -> None:
    """What re-indexing changes, arm by arm."""
    rows = result["reindexing"]["target_mse"]
    with palette.style():
        figure, axis = plt.subplots(figsize=(7.5, 0.35 * len(rows) + 1.2), layout="constrained")
        for y, row in enumerate(reversed(rows)):
            d = row["difference"]
            axis.plot([d["low"], d["high"]], [y, y], color=palette.GOOD, lw=2)
            axis.plot(d["estimate"], y, "o", color=palette.GOOD, ms=5)
        axis.set_yticks(range(len(rows)), [row["arm"] for row in reversed(rows)])
        axis.axvline(0, color=palette.INK, lw=0.8)
        axis.set_title("target mse, re-indexed minus not (left of 0: re-indexing helps)")
        axis.grid(True, axis="x")
        palette.save(figure, path)


def strips(result: dict[str, Any], folder: Path, path: Path) -> None:
    """Context, truth and every headline arm, a few tasks below each other."""
    suffix, main = result["suffix"], result["main"]
    truth = np.load(folder / "frames" / "truth.npz")
    arms = [f"{arm}@{main}{suffix}" for arm in ("decoprune", "decoprune_hs", *PUBLISHED)]
    arms = [f"full{suffix}", *arms, f"streaming{suffix}"]
    made = {arm: np.load(folder / "frames" / f"{arm}.npz")["frames"] for arm in arms}
    blocks = []
    for task in range(len(truth["frames"])):
        lines = {"context": truth["context"][task], "truth": truth["frames"][task]}
        lines |= {
            _label(arm.split("@")[0].removesuffix("+reindex")): frames[task] for arm, frames in made.items()
        }
        blocks.append(lines)
    save_strips(blocks, path)


def tables(result: dict[str, Any]) -> str:
    """The tables of the README."""
    c, suffix = result["about"]["config"], result["suffix"]
    rows = [r for r in result["order"]["target_mse"] if r["published"] and r["ratio"] == result["main"]]
    pooled, each = (
        "; ".join(f"against {_label(r['rival'])}: {r['verdict']}" for r in rows if r["each"] == flag)
        for flag in (False, True)
    )
    chosen = result["chosen"]
    missed = "" if chosen["gamma_within_slack"] else " (the best one; none came within the slack)"
    lines = [
        f"{result['tasks']} test tasks, {c['context']} frames of context, sink {c['sink']}, window {c['window']} "
        f"chunks, {result['about']['device']}, {result['about']['dtype']}. Re-indexing is "
        f"{'on' if suffix else 'off'}, as validation chose. Errors: smaller is better.",
        "",
        f"**The published order at a budget of {result['main']}** (DeCoPrune better), by the error in the "
        f"target's box: {pooled}. With the same budget in each chunk: {each}. "
        f"γ = {chosen['gamma']:.4g}{missed}, the threshold of decoprune@{chosen['gamma_ratio']}.",
        "",
        "| arm | PR | target PSNR, dB | target mse − full KV | target (1 − SSIM)/2 | target missed "
        "| view PSNR, dB | cache, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    shown = [row for row in result["arms"] if row["reindexed"] == bool(suffix)]
    for row in sorted(shown, key=lambda r: (list(COLOURS).index(r["policy"]), r["arm"])):
        lines.append(
            f"| {row['arm'].removesuffix('+reindex')} | {100 * row['pr']:.1f} % "
            f"| {psnr(row['target_mse']['estimate']):.2f} | {_interval(row['target_mse_minus_full'])} "
            f"| {row['target_dissimilarity']['estimate']:.4f} | {100 * row['target_missed']['estimate']:.1f} % "
            f"| {psnr(row['view_mse']['estimate']):.2f} | {row['cache_bytes'] / 2**20:.1f} |"
        )
    lines += [
        "",
        "| rows | arm | ms a chunk | times faster than full KV | peak, GiB |",
        "|---|---|---|---|---|",
    ]
    for row in result["speed"]:
        lines.append(
            f"| {row['rows']} | {row['arm']} | {1e3 * row['seconds']:.1f} | {row['times_faster']:.2f} "
            f"| {row['peak_bytes'] / 2**30:.2f} |"
        )
    lines += ["", "| re-indexed minus not | target mse |", "|---|---|"]
    lines += [
        f"| {row['arm']} | {_interval(row['difference'])} |" for row in result["reindexing"]["target_mse"]
    ]
    return "\n".join(lines)


def _interval(d: dict[str, float]) -> str:
    return f"{d['estimate']:+.5f} [{d['low']:+.5f}, {d['high']:+.5f}]".replace("-", "−")


def _pr(row: dict[str, Any]) -> float:
    return float(row["pr"])


def _label(policy: str) -> str:
    return NAMES.get(policy, policy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="folder of the run, with result.json")
    parser.add_argument("--readme", type=Path, help="write the tables between its markers")
    args = parser.parse_args()
    result = json.loads((args.folder / "result.json").read_text(encoding="utf-8"))
    curves(result, args.folder / "curves.png")
    differences(result, args.folder / "differences.png")
    reindexing(result, args.folder / "reindexing.png")
    strips(result, args.folder, args.folder / "strips.png")
    if args.readme:
        text = args.readme.read_text(encoding="utf-8")
        before, _, rest = text.partition(_BEGIN)
        after = rest.partition(_END)[2]
        args.readme.write_text(f"{before}{_BEGIN}\n\n{tables(result)}\n\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
