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
from statebridge.prune.benchmark.tasks import KINDS

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
_HEAD = (
    "| arm | PR | target PSNR, dB | target mse − full KV | target (1 − SSIM)/2 | target missed "
    "| view PSNR, dB | cache, MiB |",
    "|---|---|---|---|---|---|---|---|",
)
_DRAWN = 3  # tasks in the picture of strips
_BEGIN, _END = "<!-- results -->", "<!-- /results -->"


def curves(result: dict[str, Any], path: Path) -> None:
    """Error against PR, one line a policy: the target's PSNR, and paired differences to full KV."""
    rows = [row for row in result["arms"] if row["reindexed"] == bool(result["suffix"])]
    shown = {"target_mse": "target, PSNR in dB (more is better)", "target_mse_minus_full": "target mse"}
    shown |= {"target_dissimilarity_minus_full": "target (1 − SSIM) / 2", "view_mse_minus_full": "view mse"}
    with palette.style():
        figure, axes = plt.subplots(2, 2, figsize=(9.2, 6.9), sharex=True, layout="constrained")
        for axis, (name, title) in zip(axes.flat, shown.items(), strict=True):
            paired = name.endswith("_minus_full")
            scale = np.asarray if paired else psnr
            for policy, colour in COLOURS.items():
                mine = sorted((r for r in rows if r["policy"] == policy and "-each" not in r["arm"]), key=_pr)
                y, low, high = (scale([r[name][key] for r in mine]) for key in ("estimate", "low", "high"))
                if policy == "full":
                    axis.axhline(y[0], color=colour, lw=1, ls="--", label=_label(policy))
                    continue
                x = [100 * r["pr"] for r in mine]
                axis.plot(x, y, "o-", color=colour, ms=3.5, lw=1.4, label=_label(policy))
                if paired:  # tasks differ far more than policies do, so other intervals would mislead
                    axis.fill_between(x, low, high, color=colour, alpha=0.12, lw=0)
            for row in rows:
                y, colour = scale(row[name]["estimate"]), COLOURS[row["policy"]]
                if "-each" in row["arm"]:
                    axis.plot(100 * row["pr"], y, "x", ms=6, color=colour)
                elif row["arm"].removesuffix("+reindex") == f"decoprune@{result['chosen']['gamma_ratio']}":
                    axis.plot(100 * row["pr"], y, "*", ms=11, color=colour)
            axis.set_title(f"{title}, minus full KV (less is better)" if paired else title)
            axis.grid(True)
        for axis in axes[1]:
            axis.set_xlabel("history KV that attention did not see, PR in %")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        for mark, words in (("*", "the γ that validation chose"), ("x", "same budget in each chunk")):
            handles += axes[0, 0].plot([], [], mark, color=palette.INK, ms=11 if mark == "*" else 6)
            labels.append(words)
        figure.legend(handles, labels, loc="outside lower center", ncols=5)
        palette.save(figure, path)


def differences(result: dict[str, Any], path: Path) -> None:
    """Paired differences at the main budget: DeCoPrune minus each rival."""
    with palette.style():
        figure, axes = plt.subplots(1, 2, figsize=(11, 5.2), sharey=True, layout="constrained")
        titles = {"target_mse": "target mse", "target_dissimilarity": "target (1 − SSIM) / 2"}
        for axis, (name, title) in zip(axes, titles.items(), strict=True):
            rows = [r for r in result["order"][name] if r["ratio"] == result["main"]]
            for y, row in enumerate(reversed(rows)):
                d, colour = row["difference"], COLOURS[row["ours"]]
                axis.plot([d["low"], d["high"]], [y, y], color=colour, lw=2)
                axis.plot(d["estimate"], y, "o", color=colour, ms=5)
            axis.axvline(0, color=palette.INK, lw=0.8)
            axis.set_title(title)
            axis.grid(True, axis="x")
        labels = [
            f"{_label(r['ours'])} − {_label(r['rival'])}{', each' if r['each'] else ''}"
            for r in reversed(rows)
        ]
        axes[0].set_yticks(range(len(rows)), labels)
        figure.supxlabel(
            "paired difference of errors, 95 % interval; left of 0 the first is better", fontsize=9.5
        )
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
        axis.set_yticks(range(len(rows)), [_arm_label(row["arm"]) for row in reversed(rows)])
        axis.axvline(0, color=palette.INK, lw=0.8)
        axis.set_title("target mse, re-indexed minus not (left of 0: re-indexing helps)")
        axis.grid(True, axis="x")
        palette.save(figure, path)


def strips(result: dict[str, Any], folder: Path, path: Path) -> None:
    """The first tasks beside each other: what was seen, the truth, and every headline arm."""
    suffix, main = result["suffix"], result["main"]
    truth = np.load(folder / "frames" / "truth.npz")
    arms = [f"{arm}@{main}{suffix}" for arm in ("decoprune", "decoprune_hs", *PUBLISHED)]
    arms = [f"full{suffix}", *arms, f"streaming{suffix}"]
    made = {arm: np.load(folder / "frames" / f"{arm}.npz")["frames"] for arm in arms}
    judged = truth["frames"].shape[1]
    # turning to the target, then one of the frames that rest on it; of the context the early look comes first
    columns = [judged // 4, judged // 2, judged * 2 // 3 - 1, judged - 1]
    blocks = []
    for task in range(min(_DRAWN, len(truth["frames"]))):
        lines = {
            "context": truth["context"][task][[0, *columns[1:]]],
            "truth": truth["frames"][task][columns],
        }
        lines |= {
            _label(arm.split("@")[0].removesuffix("+reindex")): frames[task][columns]
            for arm, frames in made.items()
        }
        blocks.append(lines)
    kinds = [KINDS[i % len(KINDS)] for i in range(len(blocks))]  # tasks alternate
    save_strips(blocks, path, titles=kinds, across=True)


def tables(result: dict[str, Any]) -> str:
    """The tables of the README."""
    c, suffix = result["about"]["config"], result["suffix"]
    rows = [r for r in result["order"]["target_mse"] if r["published"] and r["ratio"] == result["main"]]
    pooled, each = (
        "; ".join(f"against {_label(r['rival'])}: {r['verdict']}" for r in rows if r["each"] == flag)
        for flag in (False, True)
    )
    chosen = result["chosen"]
    shown = sorted(
        (row for row in result["arms"] if row["reindexed"] == bool(suffix)), key=lambda r: _order(r["arm"])
    )
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
        *_HEAD,
        *(_arm_row(row) for row in shown if _is_headline(row["arm"], result)),
        "",
        f"Times on one {result['about']['device']}: one chunk, sampled and written, with the whole "
        "context in place.",
        "",
        *_speed_table(result["speed"]),
        "",
        "| re-indexed minus not | target mse |",
        "|---|---|",
        *(
            f"| {_arm_label(row['arm'])} | {_interval(row['difference'])} |"
            for row in result["reindexing"]["target_mse"]
        ),
        "",
        "<details><summary>Every arm</summary>",
        "",
        *_HEAD,
        *map(_arm_row, shown),
        "",
        "</details>",
    ]
    return "\n".join(lines)


def _is_headline(arm: str, result: dict[str, Any]) -> bool:
    """Full KV, streaming, everything at the main budget, and the γ that was chosen."""
    name = arm.removesuffix("+reindex")
    gamma = f"decoprune@{result['chosen']['gamma_ratio']}"
    return (
        "@" not in name or name == gamma or name.endswith((f"@{result['main']}", f"@{result['main']}-each"))
    )


def _arm_row(row: dict[str, Any]) -> str:
    return (
        f"| {_arm_label(row['arm'].removesuffix('+reindex'))} | {100 * row['pr']:.1f} % "
        f"| {psnr(row['target_mse']['estimate']):.2f} | {_interval(row['target_mse_minus_full'])} "
        f"| {row['target_dissimilarity']['estimate']:.4f} | {100 * row['target_missed']['estimate']:.1f} % "
        f"| {psnr(row['view_mse']['estimate']):.2f} | {row['cache_bytes'] / 2**20:.1f} |"
    )


def _speed_table(speed: list[dict[str, Any]]) -> list[str]:
    """One line an arm: milliseconds, times faster than full KV, and peak memory, for each number of rows."""
    rows = sorted({entry["rows"] for entry in speed})
    found = {(entry["arm"], entry["rows"]): entry for entry in speed}
    heads = [f"rows {n}: ms a chunk | times faster | peak, GiB" for n in rows]
    lines = [f"| arm | {' | '.join(heads)} |", "|---" * (1 + 3 * len(rows)) + "|"]
    for arm in sorted({entry["arm"] for entry in speed}, key=_order):
        mine = [found[arm, n] for n in rows]
        cells = (
            f"{1e3 * e['seconds']:.1f} | {e['times_faster']:.2f} | {e['peak_bytes'] / 2**30:.2f}"
            for e in mine
        )
        lines.append(f"| {_arm_label(arm)} | {' | '.join(cells)} |")
    return lines


def _order(arm: str) -> tuple[int, str]:
    return list(COLOURS).index(arm.split("@")[0].removesuffix("+reindex")), arm


def _interval(d: dict[str, float]) -> str:
    return f"{d['estimate']:+.5f} [{d['low']:+.5f}, {d['high']:+.5f}]".replace("-", "−")


def _pr(row: dict[str, Any]) -> float:
    return float(row["pr"])


def _arm_label(arm: str) -> str:
    policy, at, ratio = arm.partition("@")
    return _label(policy) + at + ratio


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
