"""Markdown tables of a full-size measurement (benchmarks/full_size.py), with its targets beside the figures.

Knows the results file, measures nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

#: Whole hand-over over the receiver's prefill, at most.
SHARE_TARGETS = {"4096": 0.05, "65536": 0.01}
#: Any stage over a plain copy of its bytes, at most.
COPY_TARGET = 8.0
#: Marks of the page that the tables go into.
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def tables(results: dict[str, Any]) -> str:
    """The tables as Markdown, one block per prefix length and a verdict on every target."""
    facts = results["environment"]
    backend = ", ".join(f"{key} {value}" for key, value in facts["backend"].items())
    blocks = [f"{facts['device']}, {' to '.join(results['models'])}; {backend}."]
    for length, found in results["lengths"].items():
        blocks.append(_stages(length, found))
    blocks.append(_verdicts(results["lengths"]))
    launched = [_kernels(length, found) for length, found in results["lengths"].items() if found["kernels"]]
    return "\n\n".join([*blocks, *launched])


def insert(page: Path, made: str) -> None:
    """Put `made` between the marks of a page, in place of what stands there."""
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    page.write_text(f"{head}{BEGIN}\n\n{made}\n\n{END}{tail}", encoding="utf-8")


def _stages(length: str, found: dict[str, Any]) -> str:
    stages, copy = found["stages"], found["copies"]
    reading = stages["receiver prefill"]["ms"]
    rows = [
        f"### {int(length):,} tokens, state of {found['state_bytes']['total']:,} bytes",
        "",
        "| stage | ms | until Python is free | share of the receiver's prefill | × plain copy | × flat copy |",
        "|---|---|---|---|---|---|",
    ]
    for name, stage in {**stages, **copy}.items():
        ms = stage["ms"]
        multiples = [f"{ms / copy[kind]['ms']:.1f}" for kind in ("plain copy", "flat copy")]
        if name.endswith("prefill") or name == "decode step":
            multiples = ["", ""]
        rows.append(
            f"| {name} | {ms:.2f} | {stage['host_ms']:.2f} | {ms / reading:.2%} | {' | '.join(multiples)} |"
        )
    if found["peak_over_state"]:
        peaks = ", ".join(f"{plan} {peak:.2f}" for plan, peak in found["peak_over_state"].items())
        rows += ["", f"Peak device memory above the source's cache, in states: {peaks}."]
    return "\n".join(rows)


def _verdicts(lengths: dict[str, Any]) -> str:
    rows = ["| target | measured | met |", "|---|---|---|"]
    for length, limit in SHARE_TARGETS.items():
        if length not in lengths:
            continue
        stages = lengths[length]["stages"]
        for name in (name for name in stages if name.startswith("hand-over")):
            share = stages[name]["ms"] / stages["receiver prefill"]["ms"]
            rows.append(
                _verdict(f"{name} at {int(length):,} ≤ {limit:.0%} of the prefill", share, limit, ".2%")
            )
    for length, found in lengths.items():
        for name, stage in found["stages"].items():
            if name in ("capture", "install") or name.startswith("translate"):
                multiple = stage["ms"] / found["copies"]["plain copy"]["ms"]
                text = f"{name} at {int(length):,} ≤ {COPY_TARGET:.0f} plain copies"
                rows.append(_verdict(text, multiple, COPY_TARGET, ".1f"))
    return "\n".join(rows)


def _verdict(text: str, value: float, limit: float, form: str) -> str:
    return f"| {text} | {value:{form}} | {'yes' if value <= limit else 'no'} |"


def _kernels(length: str, found: dict[str, Any]) -> str:
    rows = [f"Kernels at {int(length):,} tokens:", "", "| call | launches | device ms | longest |"]
    rows.append("|---|---|---|---|")
    for name, seen in found["kernels"].items():
        longest = "; ".join(f"`{key}` {count} × {ms / count:.3f}" for key, count, ms in seen["longest"][:3])
        rows.append(f"| {name} | {seen['launches']} | {seen['device_ms']:.2f} | {longest} |")
    return "\n".join(rows)
