"""The pictures about scores: arms, cost against quality, positions, documents, donors, factorial effects.

Each function takes a run and returns a PNG, or None when the run holds no such data. Colours are the palette's,
so that an arm looks the same everywhere.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from statebridge.evaluate import palette
from statebridge.evaluate.palette import colour, label
from statebridge.evaluate.report.data import Run

_WIDTH = 8.6


def png(figure: Any) -> bytes:
    """A figure as PNG bytes; it is freed."""
    out = io.BytesIO()
    palette.save(figure, out)
    return out.getvalue()


def whiskers(found: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Lengths below and above the estimate [2, 1], as matplotlib wants them; 0 where a bound is unknown."""
    ends = [found[end] if found[end] is not None else found["estimate"] for end in ("low", "high")]
    return np.array([[found["estimate"] - ends[0]], [ends[1] - found["estimate"]]])


def arms(run: Run) -> bytes:
    """NLL of every arm with its interval, and its paired distance to native."""
    found = run.result["arms"]
    order = sorted(found, key=lambda arm: found[arm]["nll"]["estimate"])
    with palette.style():
        figure, axes = plt.subplots(
            1, 2, figsize=(_WIDTH, 0.9 + 0.3 * len(order)), sharey=True, layout="constrained"
        )
        for axis, key in zip(axes, ("nll", "excess"), strict=True):
            for y, arm in enumerate(order):
                axis.errorbar(
                    found[arm][key]["estimate"],
                    y,
                    xerr=whiskers(found[arm][key]),
                    fmt="o",
                    markersize=5,
                    capsize=2.5,
                    color=colour(arm, run.handover),
                )
            axis.grid(axis="x")
            axis.margins(x=0.08)
        axes[0].set_yticks(range(len(order)), [label(arm, run.handover) for arm in order])
        for text, arm in zip(axes[0].get_yticklabels(), order, strict=True):
            text.set_fontweight("bold" if arm in (run.handover, "native") else "normal")
        axes[0].invert_yaxis()
        axes[0].set_title("NLL, nats per token\n(intervals span the spread of documents)")
        axes[1].set_title("NLL above native, nats per token\n(paired by document)")
        axes[1].axvline(0, color=palette.INK, linewidth=0.8)
        return png(figure)


def cost(run: Run) -> bytes | None:
    """Excess against the prefix tokens that the receiver reads itself, for the plain read and the hand-over."""
    found = run.result["arms"]
    plain = {int(a.split()[-1]): a for a in found if a.startswith("window ")}
    handed = {int(a.split()[-1]): a for a in found if a.startswith("handover + ")}
    if not plain:
        return None
    lines = [
        (
            "plain read of the last tokens, no state",
            palette.VIOLET,
            "s",
            ({0: "empty"} if "empty" in found else {}) | plain,
        ),
        ("hand-over, then the last tokens read", palette.GOOD, "o", {0: run.handover} | handed),
    ]
    ticks = sorted({0, *plain, *handed})
    place = {tokens: i for i, tokens in enumerate(ticks)}
    native = found["native"]["nll"]["estimate"]
    with palette.style():
        figure, axis = plt.subplots(figsize=(_WIDTH, 3.9), layout="constrained")
        for words, shade, marker, chosen in lines:
            points = sorted(chosen.items())
            axis.errorbar(
                [place[tokens] for tokens, _ in points],
                [found[arm]["excess"]["estimate"] for _, arm in points],
                yerr=np.hstack([whiskers(found[arm]["excess"]) for _, arm in points]),
                fmt=f"-{marker}",
                color=shade,
                capsize=3,
                markersize=5.5,
                label=words,
            )
        if not handed:
            axis.axhline(
                found[run.handover]["excess"]["estimate"], color=palette.GOOD, linestyle=":", linewidth=1
            )
        if "source" in found:
            axis.axhline(
                found["source"]["excess"]["estimate"],
                color=palette.MUTED,
                linestyle="--",
                linewidth=1,
                label="source goes on, no hand-over",
            )
        axis.axhline(
            0, color=palette.INK, linewidth=1, label=f"native, reads all {run.config.prefix:,} tokens"
        )
        axis.set_xticks(range(len(ticks)), [f"{tokens:,}" for tokens in ticks])
        axis.set_xlabel("prefix tokens that the receiver reads itself")
        axis.set_ylabel("NLL above native, nats per token")
        axis.grid(axis="y")
        # outside, because the lines may run through any corner
        figure.legend(loc="outside upper center", ncols=2)
        right = axis.secondary_yaxis("right", functions=(lambda y: y + native, lambda y: y - native))
        right.set_ylabel("NLL, nats per token")
        right.spines["right"].set_visible(True)
        return png(figure)


def positions(run: Run) -> bytes:
    """Excess at every scored position: the raw mean, thin, and a running mean of five, thick."""
    wanted = (
        run.handover,
        str(run.result["provenance"]["plan"]),
        "source",
        "kv only",
        "empty",
        "wrong donor",
    )
    found = run.result["excess_by_position"]
    with palette.style():
        figure, axis = plt.subplots(figsize=(_WIDTH, 3.7), layout="constrained")
        for arm in dict.fromkeys(wanted):
            if arm in found:
                values = np.array(found[arm])
                x, shade = np.arange(1, len(values) + 1), colour(arm, run.handover)
                axis.plot(x, values, color=shade, linewidth=0.7, alpha=0.4)
                axis.plot(
                    x,
                    _running_mean(values, 5),
                    color=shade,
                    linewidth=2,
                    label=label(arm, run.handover),
                )
        axis.axhline(0, color=palette.INK, linewidth=0.8)
        axis.set_xlabel("scored token after the hand-over")
        axis.set_ylabel("NLL above native, nats")
        axis.margins(x=0.01)
        axis.grid(axis="y")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return png(figure)


def documents(run: Run) -> bytes:
    """NLL of every document: native against the hand-over."""
    native, hand = (run.nll[arm].mean(1) for arm in ("native", run.handover))
    with palette.style():
        figure, axis = plt.subplots(figsize=(4.6, 4.4), layout="constrained")
        if "empty" in run.nll:
            axis.scatter(
                native, run.nll["empty"].mean(1), s=14, color=colour("empty"), alpha=0.7, label="empty"
            )
        axis.scatter(native, hand, s=18, color=palette.GOOD, label=label(run.handover, run.handover))
        _diagonal(axis, "as good as native")
        axis.set_xlabel("native, nats per token")
        axis.set_ylabel("arm, nats per token")
        axis.set_title(f"Each of {len(native)} documents")
        axis.legend(loc="upper left")
        return png(figure)


def donors(run: Run) -> bytes | None:
    """NLL of every document with its own state and with another document's."""
    if "wrong donor" not in run.nll:
        return None
    right, wrong = (run.nll[arm].mean(1) for arm in (run.handover, "wrong donor"))
    with palette.style():
        figure, axis = plt.subplots(figsize=(4.6, 4.4), layout="constrained")
        axis.scatter(right, wrong, s=18, color=palette.BAD)
        _diagonal(axis, "donor makes no difference")
        axis.set_xlabel("own state handed over, nats per token")
        axis.set_ylabel("another document's state, nats per token")
        axis.set_title(f"Own state better in {int((right < wrong).sum())} of {len(right)} documents")
        axis.legend(loc="upper left")
        return png(figure)


def effects(run: Run) -> bytes | None:
    """Main effects and interactions of translating over copying, with intervals."""
    found = run.result.get("effects")
    if found is None:
        return None
    with palette.style():
        figure, axis = plt.subplots(figsize=(_WIDTH, 0.9 + 0.33 * len(found)), layout="constrained")
        for y, (name, value) in enumerate(found.items()):
            shade = palette.GOOD if "×" not in name else palette.MUTED
            axis.errorbar(value["estimate"], y, xerr=whiskers(value), fmt="o", capsize=3, color=shade)
        axis.set_yticks(range(len(found)), list(found))
        axis.set_ylim(len(found) - 0.4, -0.6)
        axis.axvline(0, color=palette.INK, linewidth=0.8)
        axis.set_xlabel(
            "change of NLL by translating instead of copying, nats per token (left of 0: translate)"
        )
        axis.grid(axis="x")
        return png(figure)


def _diagonal(axis: Any, words: str) -> None:
    low = min(axis.get_xlim()[0], axis.get_ylim()[0])
    high = max(axis.get_xlim()[1], axis.get_ylim()[1])
    axis.plot([low, high], [low, high], color=palette.INK, linewidth=0.8, label=words, zorder=0)
    axis.set(xlim=(low, high), ylim=(low, high), aspect="equal")
    axis.grid()


def _running_mean(values: np.ndarray[Any, Any], width: int) -> np.ndarray[Any, Any]:
    """Centred mean over `width` positions, over fewer at the ends."""
    half = width // 2
    return np.array([values[max(i - half, 0) : i + half + 1].mean() for i in range(len(values))])
