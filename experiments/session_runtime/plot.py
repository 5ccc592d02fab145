"""Draws the runtime's results.

python -m experiments.session_runtime.plot RESULTS.json PICTURE.png
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from statebridge.evaluate.palette import AMBER, BAD, GOOD, INK, MUTED, VIOLET, plt, save, style

MIB = 2**20


def plain(value: float, _: int) -> str:
    """A tick as a number without powers."""
    return f"{value:,.10g}"


def memory(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Bytes by number of sessions."""
    count = [row["sessions"] for row in rows]
    kept = [row for row in rows if "every_cache_bytes" in row]
    axis.plot(
        [row["sessions"] for row in kept],
        [row["every_cache_bytes"] / MIB for row in kept],
        color=BAD,
        marker="o",
        ms=3.5,
        label="device, every cache live",
    )
    axis.plot(
        count, [row["device_bytes"] / MIB for row in rows], color=GOOD, marker="o", ms=3.5, label="device"
    )
    host = [row for row in rows if row["host_bytes"]]
    axis.plot(
        [row["sessions"] for row in host],
        [row["host_bytes"] / MIB for row in host],
        color=MUTED,
        ls="--",
        marker="o",
        ms=3.5,
        label="host",
    )
    axis.set(xscale="log", yscale="log", xlabel="sessions", ylabel="MiB held by live tensors")
    axis.xaxis.set_major_formatter(plain)
    axis.yaxis.set_major_formatter(plain)
    axis.set_title("memory", loc="left")
    axis.legend(loc="upper left")
    axis.grid(axis="y")


def residents(axis: Any, rows: list[dict[str, Any]], settings: dict[str, Any]) -> None:
    """Sessions that are there, by length."""
    opened = settings["opened"]
    places = np.arange(len(rows))
    bars = (
        ("every_cache_on_device", "every cache on the device", BAD),
        ("in_memory", "runtime: in memory", GOOD),
        ("reachable", "runtime: in memory or on disk", MUTED),
    )
    for offset, (key, label, colour) in enumerate(bars):
        values = [row[key] for row in rows]
        drawn = axis.bar(places + (offset - 1) * 0.27, values, 0.25, color=colour, label=label)
        axis.bar_label(drawn, fontsize=7.5, padding=1, color=INK)
    axis.set_xticks(places, [f"{row['tokens']:,}" for row in rows])
    budgets = f"device {settings['device_mib']} MiB, host {settings['host_mib']} MiB"
    axis.set(xlabel=f"tokens of a session ({budgets})", ylabel="sessions", ylim=(0, opened * 1.45))
    axis.set_yticks(np.linspace(0, opened, 6))
    axis.set_title(f"sessions there, of {opened} opened", loc="left")
    axis.legend(loc="upper left", fontsize=8)


def switching(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Seconds by bytes of state."""
    places = range(len(rows))
    lines = (
        ("reading_again_s", "reading the prefix again", BAD),
        ("switch_from_disk_s", "switch, from disk", AMBER),
        ("switch_from_host_s", "switch, from the host", GOOD),
        ("plain_copies_s", "two plain copies", VIOLET),
    )
    for key, label, colour in lines:
        axis.plot(places, [1000 * row[key] for row in rows], color=colour, marker="o", ms=3.5, label=label)
    axis.set(yscale="log", xlabel="tokens of a session (MiB of its state)", ylabel="milliseconds")
    axis.set_xticks(places, [f"{row['tokens']:,}\n({row['state_bytes'] / MIB:.1f})" for row in rows])
    axis.yaxis.set_major_formatter(plain)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * 8)
    axis.set_title("time of a switch", loc="left")
    axis.legend(loc="upper left", fontsize=8)
    axis.grid(axis="y")


def draw(results: dict[str, Any], target: Path) -> None:
    """Three panels: memory, sessions, switches."""
    with style():
        figure, axes = plt.subplots(1, 3, figsize=(12.5, 3.7), constrained_layout=True)
        memory(axes[0], results["by_count"])
        residents(axes[1], results["by_budget"], results["settings"])
        switching(axes[2], results["by_size"])
        save(figure, target)


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
