"""Draws the planner's results.

python -m experiments.planner.plot RESULTS.json PICTURE.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from experiments.planner.run import POLICIES, arm_name
from statebridge.evaluate.palette import AMBER, BAD, GOOD, INK, MUTED, SHADES, VIOLET, plt, save, style

COLOURS = {
    "LRU": BAD,
    "size-aware": AMBER,
    "TTL": "#8a6d3b",
    "relevance": GOOD,
    "pinned": VIOLET,
    "LRU + shrinking": MUTED,
    "LRU + admission": SHADES[2],
}


def draw(results: dict[str, Any], target: Path) -> None:
    """Three panels: branches kept, results found, anchors kept."""
    budgets = results["settings"]["budgets"]
    texts = results["settings"]["texts"]
    with style():
        figure, (kept, found, anchors) = plt.subplots(
            1, 3, figsize=(11.5, 3.5), width_ratios=(1, 1, 0.9), constrained_layout=True
        )
        for axis, measure in ((kept, "kept"), (found, "found")):
            ends = []
            for name in POLICIES:
                for tidy, dashes in ((False, "-"), (True, ":")):
                    if arm_name(name, budgets[0], tidy) not in results["arms"]:
                        continue
                    arms = [results["arms"][arm_name(name, budget, tidy)] for budget in budgets]
                    means = [float(np.mean(arm[measure])) for arm in arms]
                    thick = name in ("LRU", "relevance")
                    axis.plot(
                        range(len(budgets)),
                        means,
                        dashes,
                        color=COLOURS[name],
                        lw=2.2 if thick else 1.1,
                        marker="o",
                        ms=4 if thick else 3,
                        zorder=3 if thick else 2,
                        label=f"{name}, tidy" if tidy else name,
                    )
                    ends.append(means[-1])
            axis.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
            axis.set_xlabel("sessions that the host can hold")
            axis.set_ylim(0, 1.04)
            axis.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            axis.grid(axis="y")
        kept.set_title("branches of the exact search that were there", loc="left")
        found.set_title(f"searches that found the best path (of {texts})", loc="left")
        kept.legend(loc="upper left", fontsize=7.5, ncols=2, borderaxespad=0.2)
        kept.set_ylim(0, 1.45)
        kept.set_yticks(np.linspace(0, 1, 6))
        names = list(results["anchors"])[::-1]
        values = [results["anchors"][name]["kept"] for name in names]
        total = results["anchors"][names[0]]["anchors"]
        anchors.barh(names, values, color=[COLOURS[name] for name in names], height=0.65)
        for row, value in enumerate(values):
            anchors.text(value + 0.2, row, f"{value} of {total}", va="center", fontsize=8.5, color=INK)
        anchors.set_xlim(0, total * 1.28)
        anchors.set_xticks([])
        anchors.spines["bottom"].set_visible(False)
        anchors.tick_params(left=False)
        anchors.set_title("anchors kept under a tight budget", loc="left")
        save(figure, target)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
