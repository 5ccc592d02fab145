"""Draw what `run.py` measured: losses of a hybrid model by length, its bytes, and the video transformer.

    python -m experiments.fingerprint.plot

Reads `results/*.json`, writes `fingerprint.png`. Knows the files, no runtime.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D

from statebridge.evaluate.palette import AMBER, BAD, GOOD, INK, MUTED, VIOLET, save, style

HERE = Path(__file__).parent
_MODES = {"fresh": (GOOD, "as new"), "zero": (AMBER, "zeros"), "foreign": (BAD, "another session's")}
_NAMES = {
    "key": "K: keys",
    "value": "K: values",
    "recurrent_state": "R",
    "conv_state": "C",
    "flags": "flags",
    "position": "position",
    "pad_mask": "mask",
    "token_ids": "token ids",
    "generator": "random state",
    "attention": "all of K",
    "recurrent": "all of R, C, flags",
    "kv": "keys, values",
    "noise": "noise ahead",
    "latents": "clean latents",
    "prompt": "prompt",
    "clock": "clock",
}
#: Below this a distance counts as none in the pictures.
_FLOOR = 1e-4


def main() -> None:
    """Draw the picture."""
    language, video = (
        json.loads((HERE / "results" / f"{name}.json").read_text()) for name in ("language_source", "video")
    )
    with style():
        figure, axes = plt.subplots(2, 2, figsize=(12, 8.6), layout="constrained")
        _by_length(axes[0, 0], language)
        _by_layer(axes[0, 1], language)
        _bytes(axes[1, 0], language)
        _samplers(axes[1, 1], video)
        save(figure, HERE / "fingerprint.png")


def _by_length(axis: Any, language: dict[str, Any]) -> None:
    """Divergence without each component, at every length, in the mode that hurts least."""
    lengths = [str(n) for n in language["lengths"]]
    findings = [
        *_findings(language["component, KL"], "key", "value", "recurrent_state", "conv_state"),
        *_findings(language["memory, KL"], "attention", "recurrent", "position", "pad_mask"),
    ]
    shades = (MUTED, VIOLET, INK)
    for row, finding in enumerate(findings):
        for place, (length, shade) in enumerate(zip(lengths, shades, strict=True)):
            found = min(
                _distance(trial, length) for mode, trial in finding["trials"].items() if mode != "foreign"
            )
            label = f"{int(length):,} tokens" if row == 0 else None
            axis.barh(row + (place - 1) * 0.26, max(found, _FLOOR), 0.24, color=shade, label=label)
    _named(axis, [finding["name"] for finding in findings])
    axis.set_xscale("log")
    axis.set_xlim(_FLOOR, 80)
    axis.set_xlabel("KL from the session that never left, nats per token")
    axis.set_title("Source: what is lost without a part (best of as new and zeros)", loc="left")
    axis.legend(loc="lower right")


def _by_layer(axis: Any, language: dict[str, Any]) -> None:
    """Divergence with one layer's memory replaced, at the longest prefix."""
    longest = str(language["lengths"][-1])
    every = language["layer, KL"]["findings"]
    findings = sorted((f for f in every if f["name"].startswith("layers.")), key=lambda f: f["name"])
    _modes(axis, findings, longest)
    kinds = {"attention": "attention", "recurrent": "R, C"}
    _named(axis, [f"layer {f['name'].split('.')[1]}: {kinds[f['name'].split('.')[2]]}" for f in findings])
    axis.set_xlabel("KL, nats per token (left edge: up to 0.0001; ×: the return is refused)")
    axis.legend(handles=_handles(), loc="upper right")
    axis.set_title(f"Source: one layer's memory replaced, {int(longest):,} tokens", loc="left")


def _bytes(axis: Any, language: dict[str, Any]) -> None:
    """Bytes of each component of one row against length."""
    lengths = language["lengths"]
    found = language["component, KL"]["findings"]
    groups = {
        "K (grows)": (GOOD, ("key", "value")),
        "R (flat)": (INK, ("recurrent_state",)),
        "C (flat)": (VIOLET, ("conv_state",)),
        "token ids (grow)": (MUTED, ("token_ids",)),
    }
    for label, (shade, names) in groups.items():
        sizes = [sum(f["nbytes"][str(n)] for f in found if f["name"] in names) / 2 for n in lengths]
        axis.plot(lengths, sizes, marker="o", color=shade, label=label)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
    axis.set_xlabel("tokens read")
    axis.set_ylabel("bytes per row, float32")
    axis.grid(axis="y")
    axis.set_title("Source: how the state grows, as measured", loc="left")
    axis.legend()


def _samplers(axis: Any, video: dict[str, Any]) -> None:
    """Largest change of the next two chunks, per buffer and sampler."""
    names = ("kv", "latents", "noise", "prompt", "generator")
    rows, labels = [], []
    for sampler in ("deterministic", "stochastic"):
        for finding in _findings(video[sampler], *names):
            rows.append(finding)
            labels.append(
                f"{_NAMES.get(finding['name'], finding['name'].replace('generator', 'random state'))}"
            )
    _modes(axis, rows, None)
    for row, finding in enumerate(rows):
        if derived := finding["trials"].get("derived"):
            worst = max(_distance(derived, length) for length in derived["distances"])
            axis.plot(max(worst, _FLOOR), row, "D", color=VIOLET)
    _named(axis, labels)
    axis.axhline(len(names) - 0.5, color=MUTED, linewidth=0.8)
    for place, sampler in ((0, "deterministic sampler"), (len(names), "stochastic sampler")):
        axis.text(3 * _FLOOR, place - 0.4, sampler, va="top", color=MUTED)
    axis.set_xlabel("largest change of the next two chunks (left edge: none; ×: refused)")
    axis.set_title("Video transformer (22,400 random weights): buffers replaced", loc="left")
    axis.legend(handles=_handles(derived=True), loc="center", bbox_to_anchor=(0.3, 0.62))


def _handles(derived: bool = False) -> list[Line2D]:
    marks = [
        Line2D([], [], color=shade, marker="o", linestyle="", label=label) for shade, label in _MODES.values()
    ]
    return (
        [*marks, Line2D([], [], color=VIOLET, marker="D", linestyle="", label="derived")]
        if derived
        else marks
    )


def _modes(axis: Any, findings: list[dict[str, Any]], length: str | None) -> None:
    """One mark per mode; at one length, or the largest over all."""
    for mode, (shade, _) in _MODES.items():
        shift = (list(_MODES).index(mode) - 1) * 0.2
        for row, finding in enumerate(findings):
            trial = finding["trials"][mode]
            lengths = [length] if length else list(trial["distances"])
            found = max(_distance(trial, each) for each in lengths)
            place, mark = (30.0, "x") if math.isinf(found) else (max(found, _FLOOR), "o")
            axis.plot(place, row + shift, mark, color=shade)
    axis.set_xscale("log")
    axis.set_xlim(_FLOOR / 1.5, 45)
    axis.grid(axis="x")


def _named(axis: Any, names: list[str]) -> None:
    axis.set_yticks(range(len(names)), [_NAMES.get(name, name) for name in names])
    axis.invert_yaxis()


def _findings(fingerprint: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    by_name = {finding["name"]: finding for finding in fingerprint["findings"]}
    return [by_name[name] for name in names]


def _distance(trial: dict[str, Any], length: str) -> float:
    return float(trial["distances"][length])


if __name__ == "__main__":
    main()
