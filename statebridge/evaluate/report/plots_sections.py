"""The pictures about further measurements: recall by depth, free-running generation, the calibrator.

Same contract as `plots`: a run in, a PNG out, None where the run holds no such data.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np

from statebridge.evaluate import palette
from statebridge.evaluate.palette import colour, label
from statebridge.evaluate.report.data import Run
from statebridge.evaluate.report.plots import png, whiskers

_WIDTH = 8.6
_FIELDS = {
    "key": ("K keys", "o", palette.SHADES[0]),
    "value": ("K values", "s", palette.SHADES[2]),
    "recurrent_state": ("R recurrent matrices", "D", palette.VIOLET),
    "conv_state": ("C convolution history", "^", palette.AMBER),
}


def recall(run: Run) -> bytes | None:
    """Share of facts recalled, by how far before the end of the prefix they stand."""
    found = run.result.get("recall")
    if found is None:
        return None
    depths = list(next(iter(found.values())))
    with palette.style():
        figure, axis = plt.subplots(figsize=(_WIDTH, 3.7), layout="constrained")
        for i, (arm, by_depth) in enumerate(found.items()):
            # side by side, because arms that recall all or nothing would hide each other
            x = np.arange(len(depths)) + (i - (len(found) - 1) / 2) * 0.09
            axis.errorbar(
                x,
                [100 * by_depth[depth]["estimate"] for depth in depths],
                yerr=100 * np.hstack([whiskers(by_depth[depth]) for depth in depths]),
                fmt="-o",
                markersize=4.5,
                linewidth=1.2,
                elinewidth=0.9,
                color=colour(arm, run.handover),
                label=label(arm, run.handover),
            )
        axis.set_xticks(range(len(depths)), [f"{int(depth):,}" for depth in depths])
        axis.set_xlabel("depth: tokens between the fact and the end of the prefix")
        axis.set_ylabel("recalled exactly, %")
        axis.set_ylim(-4, 104)
        axis.grid(axis="y")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return png(figure)


def generation(run: Run) -> bytes | None:
    """Agreement of every arm's own writing with native's, greedy and sampled."""
    found = run.result.get("generation")
    if found is None:
        return None
    arms = list(next(iter(found.values())))
    tokens = next(iter(next(iter(found.values())).values()))["tokens"]
    panels = (
        ("agreement", 100, "same token as native at the same place, %"),
        ("divergence", 1, f"tokens before the first difference (of {tokens})"),
    )
    with palette.style():
        figure, axes = plt.subplots(
            1, 2, figsize=(_WIDTH, 1.4 + 0.42 * len(arms)), sharey=True, layout="constrained"
        )
        for axis, (key, scale, words) in zip(axes, panels, strict=True):
            for m, (mode, by_arm) in enumerate(found.items()):
                for y, arm in enumerate(arms):
                    value = by_arm[arm][key]
                    axis.errorbar(
                        scale * value["estimate"],
                        y + (m - 0.5) * 0.24,
                        xerr=scale * whiskers(value),
                        fmt="os"[m],
                        markerfacecolor=colour(arm, run.handover) if m == 0 else "white",
                        capsize=2.5,
                        color=colour(arm, run.handover),
                    )
                axis.plot(
                    [],
                    [],
                    "os"[m],
                    color=palette.INK,
                    markerfacecolor=palette.INK if m == 0 else "white",
                    label=mode,
                )
            full = scale * (tokens if key == "divergence" else 1)
            axis.set_xlim(-0.02 * full, 1.02 * full)
            axis.set_xlabel(words)
            axis.grid(axis="x")
        axes[0].set_yticks(range(len(arms)), [label(arm, run.handover) for arm in arms])
        axes[0].set_ylim(len(arms) - 0.5, -0.5)
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
        return png(figure)


def calibration(run: Run) -> bytes | None:
    """Validation KL by training step, one line for each point of the grid."""
    found = run.result["bridge"]["calibration"]
    if not found.get("grid"):
        return None
    chosen = found["chosen"]
    ranks = sorted({point["rank"] for point in found["grid"]})
    weights = sorted({point["penalty"] for point in found["grid"]})
    with palette.style():
        figure, axis = plt.subplots(figsize=(_WIDTH, 3.6), layout="constrained")
        for point in found["grid"]:
            best = all(point[key] == chosen[key] for key in ("rank", "penalty"))
            axis.plot(
                [row["step"] for row in point["curve"]],
                [row["validation_kl"] for row in point["curve"]],
                color=(palette.VIOLET, palette.AMBER, palette.MUTED, palette.BAD)[
                    ranks.index(point["rank"]) % 4
                ]
                if not best
                else palette.GOOD,
                linestyle=("-", "--", ":", "-.")[weights.index(point["penalty"]) % 4],
                linewidth=2.4 if best else 1.2,
                label=f"rank {point['rank']}, penalty {point['penalty']:g}" + (" (chosen)" if best else ""),
            )
        axis.plot(chosen["step"], chosen["validation_kl"], "o", color=palette.GOOD)
        axis.set_xlabel("training step")
        axis.set_ylabel("validation KL from native, nats")
        axis.grid(axis="y")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return png(figure)


def residuals(run: Run) -> bytes | None:
    """How far the calibrator moves the state, by layer and field."""
    found = run.result.get("residuals")
    if not found:
        return None
    with palette.style():
        figure, axis = plt.subplots(figsize=(_WIDTH, 3.3), layout="constrained")
        for field, (words, marker, shade) in _FIELDS.items():
            rows = [row for row in found if row["field"] == field]
            if rows:
                axis.plot(
                    [row["layer"] for row in rows],
                    [100 * row["mean"] for row in rows],
                    marker,
                    color=shade,
                    label=words,
                )
        axis.set_xlabel("layer")
        axis.set_ylabel("calibrator's change, % of the norm")
        axis.set_ylim(bottom=0)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(axis="y")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return png(figure)
