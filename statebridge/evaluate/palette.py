"""One colour and one label for each arm, the same in every picture."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no screen is needed to save a picture

import matplotlib.pyplot as plt

INK, MUTED, GOOD, BAD, AMBER, VIOLET = "#1f2933", "#7b8794", "#0b7285", "#c92a2a", "#d9a441", "#7048a8"
#: Shades of the hand-over, darkest first: its steps, or the components K, R and C.
SHADES = (GOOD, "#2f8a9c", "#66a3b0")
_FIXED = {
    "native": INK,
    "restore": INK,
    "source": MUTED,
    "empty": AMBER,
    "wrong donor": BAD,
    "handover": GOOD,
    "calibrated": GOOD,
    "kv only": "#b5651d",
    "gdn only": "#8a6d3b",
}


def colour(arm: str, handover: str = "handover") -> str:
    """The colour of an arm; `handover` names the arm that is the hand-over."""
    if arm == handover or arm.startswith("handover + "):
        return GOOD
    if arm.startswith("window "):
        return VIOLET
    if arm.startswith("wrong donor"):
        return BAD
    return _FIXED.get(arm, SHADES[2])


def label(arm: str, handover: str = "handover") -> str:
    """An arm as readers see it."""
    if arm == handover:
        return "hand-over" if arm == "handover" else f"hand-over ({arm})"
    kind, _, number = arm.rpartition(" ")
    if number.isdigit():
        words = {"window": "last {} read", "handover +": "hand-over + {} read"}
        return words[kind].format(f"{int(number):,}")
    return {"kv only": "K only", "gdn only": "R and C only"}.get(arm, arm)


@contextmanager
def style() -> Iterator[None]:
    """The look of every picture."""
    look: dict[str, Any] = {
        "font.size": 10,
        "axes.titlesize": 10,
        "axes.labelsize": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.unicode_minus": True,
        "grid.color": "#e4e7eb",
        "legend.frameon": False,
        "legend.fontsize": 9,
    }
    with plt.rc_context(look):
        yield


def save(figure: Any, target: Any, dpi: int = 130) -> None:
    """Write a figure as PNG into a path or a binary file, and free it."""
    # without a version in the metadata the same numbers give the same bytes
    options = {"metadata": {"Software": None}, "dpi": dpi, "format": "png"}
    figure.savefig(str(target) if isinstance(target, Path) else target, **options)
    plt.close(figure)
