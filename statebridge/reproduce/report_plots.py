"""The picture that only a whole reproduction has: ours and the published figures with both intervals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt

from statebridge.evaluate import palette
from statebridge.evaluate.report.plots import png, whiskers

_WIDTH = 8.6
#: What the axis of each panel measures.
_UNITS = ("nats per token", "nats per token, or a share", "nats per token (small differences)")


def beside(pairs: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]) -> bytes:
    """One line per figure: ours above, the published one below it; NLLs, shares and small differences apart.

    Parameters
    ----------
    pairs
        Words -> (ours, published), each with estimate, low and high.
    """
    # NLLs of a few nats, and shares, would flatten differences of hundredths
    panels: dict[int, dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]]] = {0: {}, 1: {}, 2: {}}
    for words, pair in pairs.items():
        small = words.startswith(("effect", "excess", "gain by the calibrator", "full translation −"))
        panels[0 if words.startswith("NLL") else 2 if small else 1][words] = pair
    drawn = [panel for panel in panels.values() if panel]
    heights = [len(panel) for panel in drawn]
    with palette.style():
        figure, axes = plt.subplots(
            len(drawn),
            1,
            figsize=(_WIDTH, 1.1 * len(drawn) + 0.36 * sum(heights)),
            height_ratios=heights,
            layout="constrained",
            squeeze=False,
        )
        units = [words for words, panel in zip(_UNITS, panels.values(), strict=True) if panel]
        for axis, panel, unit in zip(axes[:, 0], drawn, units, strict=True):
            _draw(axis, panel)
            axis.set_xlabel(unit)
        figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
        return png(figure)


def _draw(axis: Any, panel: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    for number, (ours, theirs) in enumerate(panel.values()):
        for found, shift, shade, marker, words in (
            (ours, -0.16, palette.GOOD, "o", "ours"),
            (theirs, 0.16, palette.MUTED, "D", "published"),
        ):
            axis.errorbar(
                found["estimate"],
                number + shift,
                xerr=whiskers(found),
                fmt=marker,
                markersize=4.5,
                capsize=2.5,
                color=shade,
                label=words if number == 0 else None,
            )
    axis.set_yticks(range(len(panel)), list(panel))
    axis.set_ylim(len(panel) - 0.4, -0.6)
    if not next(iter(panel)).startswith("NLL"):
        axis.axvline(0, color=palette.INK, linewidth=0.8)
    axis.grid(axis="x")
