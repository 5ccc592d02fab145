"""Tables of the full-size proof from the JSON of its parts, with the arithmetic of every extrapolation.

    python -m experiments.full_size_proof.table runs/proof

    time at full size = time here · expected time of the full plan / expected time of this plan

Both plans are those of `statebridge reproduce --dry-run`: tokens of each model over its throughput, and passes.
Solving the maps is in the stage "fit" and grows with states; its own figures stand under "Cost of fitting".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from statebridge.config import load_config
from statebridge.reproduce import SuiteConfig
from statebridge.reproduce.plan import Sizes, calibration_rounds, expect

HERE = Path(__file__).parent
FULL = HERE.parents[1] / "configs" / "qwen3_5_4b_9b.yaml"


def facts(found: dict[str, Any]) -> str:
    """Published counts, met."""
    keys = [key for key, value in found.items() if isinstance(value, int) and "peak" not in key]
    return _table(("fact", "value"), [(key, f"{found[key]:,}") for key in keys])


def restore(found: dict[str, Any]) -> str:
    """The restore control of both models."""
    rows = [
        (name, f"{row['length']:,}", str(row["contexts"]), f"{row['top1']:.2%}", f"{row['max_difference']:g}")
        for name in ("source", "receiver")
        for row in found[name]["lengths"]
    ]
    return _table(("model", "prefix", "contexts", "top-1", "largest logit difference"), rows)


def ridge(found: dict[str, Any]) -> str:
    """Seconds of collecting and fitting, here and for the published number of documents."""
    seconds, scale = found["seconds"], found["published_documents"] / found["documents"]
    forward, rows = seconds["forward"], []
    for name, full in _fitting(found).items():
        rows.append((name, f"{seconds[name]:.2f}", f"{full:.1f}", f"{full / (forward * scale):.1%}"))
    moments = seconds["moments"] * scale
    solving = sum(v for k, v in seconds.items() if k.startswith("fit ") and k != "fit recurrent_state")
    on_top = (moments + solving) / (forward * scale)
    said = (
        f"Ridge maps on top of the forward passes: ({seconds['moments']:.2f} s moments · {scale:g} + {solving:.2f} s "
        f"solving) / ({forward:.2f} s forward · {scale:g}) = {on_top:.1%}; target: at most 20 %."
    )
    header = (
        "step",
        f"s, {found['documents']} documents",
        f"s, {found['published_documents']}",
        "of the forward passes",
    )
    return _table(header, rows) + "\n\n" + said


def _fitting(found: dict[str, Any]) -> dict[str, float]:
    """Seconds of each step for the published documents; maps fitted from moments take the same for any number."""
    scale, seconds = found["published_documents"] / found["documents"], found["seconds"]
    fixed = {name for name in seconds if name.startswith("fit ") and name != "fit recurrent_state"} | {
        "warm up"
    }
    return {name: value if name in fixed else value * scale for name, value in seconds.items()}


def _training(cost: dict[str, float]) -> tuple[float, float, float]:
    """Seconds of preparing, of steps and of evaluations over the published grid, one document a pass."""
    full = load_config(SuiteConfig, FULL, ())
    steps, judged = calibration_rounds(full)
    documents = full.fit.fit_documents + full.selection.count
    trained, read = steps * full.calibrate.batch_size, judged * full.selection.count
    return documents * cost["prepare"], trained * cost["step"], read * cost["evaluate"]


def calibrate(found: dict[str, Any]) -> str:
    """Milliseconds of a document with its state in each place, and hours of the published grid."""
    full = load_config(SuiteConfig, FULL, ())
    steps, judged = calibration_rounds(full)
    trained, read = steps * full.calibrate.batch_size, judged * full.selection.count
    documents = full.fit.fit_documents + full.selection.count
    rows, said = [], []
    for name, cost in found["modes"].items():
        whole = sum(_training(cost))
        times = (f"{1e3 * cost[part]:.1f}" for part in ("prepare", "read", "step", "evaluate"))
        rows.append((name, *times, f"{whole / 3600:.2f}"))
        said.append(
            f"{name}: {documents} · {cost['prepare']:.3f} s + {trained:,} · {cost['step']:.4f} s + {read:,} · "
            f"{cost['evaluate']:.4f} s = {whole:,.0f} s"
        )
    header = ("states", "prepare, ms", "read, ms", "step, ms", "evaluate, ms", "published grid, h")
    one = next(iter(found["modes"].values()))
    text = (
        f"All per document, one document a pass. A state takes {one['state_bytes']:,} bytes, native logits "
        f"{one['logit_bytes']:,}; the "
        f"backward pass uses the {found['backward']['name']} functions. The published grid prepares {documents} "
        f"documents, takes {steps:,} steps of {full.calibrate.batch_size} and reads {full.selection.count} "
        f"validation documents {judged} times, at most; " + "; ".join(said) + "."
    )
    return _table(header, rows) + "\n\n" + text


def suite(manifest: dict[str, Any], parts: dict[str, Any]) -> str:
    """Costs of every stage, and their extrapolation to the published numbers of documents.

    What another part measured by itself is taken from there; the rest scales with the expected time, which counts
    the tuning of kernels in with it and is therefore too much.
    """
    small, full = load_config(SuiteConfig, HERE / "suite.yaml", ()), load_config(SuiteConfig, FULL, ())
    sizes = Sizes.of(full)
    ours, theirs = expect(small, sizes), expect(full, sizes)
    rows, total, total_full = [], 0.0, 0.0
    for name, record in manifest["stages"].items():
        seconds = record["cost"]["seconds"]
        here, there = (
            plan[name].seconds(config) if name in plan else None
            for plan, config in ((ours, small), (theirs, full))
        )
        scaled, estimate = "", seconds
        if name in parts:
            scaled, estimate = f"measured, part {parts[name][0]}", parts[name][1]
        elif here and there:
            scaled, estimate = f"{seconds:.1f} · {there:.1f} / {here:.2f}", seconds * there / here
        total, total_full = total + seconds, total_full + estimate
        rows.append((*_cost(name, record["cost"]), scaled, f"{estimate / 60:.1f}"))
    rows.append(("all", f"{total:.1f}", *[""] * (len(COST) - 1), f"{total_full / 60:.1f}"))
    return _table((*COST, "to full size, s", "min"), rows)


def shared(manifest: dict[str, Any]) -> str:
    """Costs of every stage of a run that several processes share."""
    return _table(COST, [_cost(name, record["cost"]) for name, record in manifest["stages"].items()])


COST = ("stage", "s", "tokens", "tokens/s", "device GB", "host GB", "disk GB")


def _cost(name: str, cost: dict[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{cost['seconds']:.1f}",
        f"{cost['source_tokens'] + cost['receiver_tokens']:,}",
        f"{cost['tokens_per_second']:,.0f}",
        *(f"{cost[key] / 1e9:.2f}" for key in ("device_bytes", "host_bytes", "disk_bytes")),
    )


def _whole(found: dict[str, Any]) -> dict[str, tuple[str, float]]:
    """Stage -> the part that measured what it takes at full size, and seconds."""
    whole = {}
    if "restore" in found:
        whole["restore"] = (
            "restore",
            sum(found["restore"][end]["seconds"] for end in ("source", "receiver")),
        )
    if "ridge" in found:
        whole["fit"] = ("ridge", sum(_fitting(found["ridge"]).values()))
    if "calibrate" in found:
        mode = load_config(SuiteConfig, FULL, ()).calibrate.states
        whole["calibrate"] = ("calibrate", sum(_training(found["calibrate"]["modes"][mode])))
    return whole


def two(found: dict[str, Any]) -> str:
    """What several devices gave."""
    rows = [(key, str(value)) for key, value in found.items() if key != "failed"]
    return _table(("figure", "value"), rows)


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


def main() -> None:
    """Print the tables of all parts that are there."""
    folder = Path(sys.argv[1])
    parts = {
        "facts": ("Counts", facts),
        "restore": ("Restore control", restore),
        "ridge": ("Cost of fitting", ridge),
        "calibrate": ("Cost of calibrating", calibrate),
        "suite": ("The suite with few documents", suite),
        "shared": ("The suite shared by two processes on two GPUs", shared),
        "moments": ("Two processes against one", two),
        "devices": ("Models on several devices", two),
    }
    found = {
        name: json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in parts
        if (folder / f"{name}.json").exists()
    }
    for name, (title, make) in parts.items():
        if name in found:
            print(
                f"## {title}\n\n{make(found[name], _whole(found)) if make is suite else make(found[name])}\n"
            )


if __name__ == "__main__":
    main()
