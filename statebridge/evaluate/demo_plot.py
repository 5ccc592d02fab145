"""The demo's picture: time to the first token, likelihood of the true continuation, bytes moved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from statebridge.evaluate import palette
from statebridge.evaluate.demo import DemoResult


def save_demo_plot(result: DemoResult, path: Path) -> None:
    """Draw `result` into a PNG file."""
    with palette.style():
        figure, (times, scores, moved) = plt.subplots(
            1, 3, figsize=(12.5, 3.9), width_ratios=(1.15, 1.25, 0.8), layout="constrained"
        )
        _times(times, result)
        _scores(scores, result)
        _bytes(moved, result)
        figure.suptitle(
            f"{result.prefix_tokens:,} tokens of {result.document}, handed over with plan {result.plan}; "
            f"prefix tokens the receiver read: {result.prefix_tokens_processed}",
            fontsize=11,
        )
        palette.save(figure, path)


def _times(axis: Any, result: DemoResult) -> None:
    steps = ("capture", "translate", "first_token")
    ways = {
        "hand-over": "\n".join(f"{step.replace('_', ' ')} {_time(result.seconds[step])}" for step in steps),
        "re-reading": f"{_time(result.seconds['reread'])}",
    }
    seconds = [result.seconds["handover"], result.seconds["reread"]]
    bars = axis.barh(list(ways), seconds, color=[palette.GOOD, palette.INK], height=0.55)
    # a hand-over is often too short to show its steps as pieces of a bar
    axis.bar_label(bars, list(ways.values()), fontsize=9, padding=4)
    axis.set_xlim(0, 1.3 * max(seconds))
    axis.set_title(
        f"Time to the receiver's first token\n{result.speedup:.0f}× sooner by hand-over", fontsize=10
    )
    axis.set_xlabel("seconds")
    axis.invert_yaxis()


def _scores(axis: Any, result: DemoResult) -> None:
    arms = list(result.nll)
    values = [result.nll[arm] for arm in arms]
    bars = axis.bar([palette.label(a) for a in arms], values, color=[palette.colour(a) for a in arms])
    axis.bar_label(bars, fmt="%.2f", fontsize=9, padding=2)
    spread = max(values) - min(values)
    axis.set_ylim(max(min(values) - spread, 0), max(values) + 0.2 * spread)
    axis.set_title(
        f"NLL of the next {result.targets} true tokens\n(lower is better; axis does not start at 0)",
        fontsize=10,
    )
    axis.set_ylabel("nats per token")
    axis.tick_params(axis="x", labelrotation=20)


def _bytes(axis: Any, result: DemoResult) -> None:
    names = {"K": "K  keys, values", "R": "R  recurrent", "C": "C  convolution"}
    sizes = {names[c]: n / 2**20 for c, n in result.moved_bytes.items()}
    bars = axis.barh(list(sizes), list(sizes.values()), color=palette.SHADES)
    axis.bar_label(bars, fmt="%.2f", fontsize=9, padding=3)
    axis.set_xlim(0, 1.3 * max(sizes.values()))
    axis.set_title(f"State moved\n{sum(sizes.values()):.1f} MiB in all", fontsize=10)
    axis.set_xlabel("MiB")
    axis.invert_yaxis()


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
