"""The sections that only a whole reproduction has; each takes plain data of the run's folder.

The published figures lie in `published.json`, with the intervals that were published; ours never change them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from statebridge.evaluate.report import Run
from statebridge.evaluate.report.blocks import Gate, Picture, Section, Table
from statebridge.evaluate.report.words import interval, number
from statebridge.evaluate.report.words import summary as words_of
from statebridge.reproduce.report_plots import beside

_HEADINGS = {
    "e001": "Experiment 1 beside the published figures",
    "selection": "The selection's scores beside the published figures",
    "e002": "Experiment 2 beside the published figures",
}


def published_figures() -> dict[str, dict[str, dict[str, Any]]]:
    """Experiment -> figure -> estimate and interval, as published for the 4B and 9B models."""
    text = files("statebridge.reproduce").joinpath("published.json").read_text(encoding="utf-8")
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(text)
    return found


def apart(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Whether two figures agree: by their intervals where both have one."""
    if ours["estimate"] is None:
        return "undefined here"
    ends = [(found.get("low"), found.get("high")) for found in (ours, theirs)]
    (low, high), (their_low, their_high) = ends
    if low is None or high is None:
        return "no interval"
    if their_low is None or their_high is None:
        inside = low <= theirs["estimate"] <= high
        return "published lies inside" if inside else "published lies outside"
    return "overlap" if low <= their_high and their_low <= high else "apart"


def published(figures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Iterator[Section]:
    """Every figure of ours beside the published one."""
    known = published_figures()
    for experiment, ours in figures.items():
        theirs = known[experiment]
        rows, pairs = [], {}
        for key, found in ours.items():
            if key not in theirs:
                rows.append((found["words"], _shown(found), "not published", ""))
                continue
            rows.append((found["words"], _shown(found), _shown(theirs[key]), apart(found, theirs[key])))
            if found["estimate"] is not None:
                pairs[found["words"]] = (found, theirs[key])
        said = (
            "Published for Qwen3.5-4B-Base to Qwen3.5-9B-Base; figures of another pair stand beside them for "
            "orientation. NLL in nats per token; brackets are 95 % intervals over documents, and figures without "
            "were published without.",
        )
        picture = Picture(f"{experiment}_published", "Ours and the published figures", beside(pairs))
        table = Table(("figure", "ours", "published", "intervals"), tuple(rows), words=frozenset({0, 3}))
        yield Section(_HEADINGS[experiment], said, (picture,) if pairs else (), (table,))


def _shown(found: Mapping[str, Any]) -> str:
    if found["low"] is None and found["high"] is None:
        return number(found["estimate"], 4)
    return interval(found, 4)


def summary(manifest: Mapping[str, Any], selection: Mapping[str, Any], judged: Run) -> list[str]:
    """What came out, in sentences."""
    lines = words_of(judged.result, judged.config.prefix)
    if selection:
        lines.append(f"Of the eight plans {selection['plan']} was chosen: {selection['reason']}")
    known, found = published_figures(), {"overlap": 0, "apart": 0}
    for experiment, ours in manifest["figures"].items():
        for key in ours.keys() & known[experiment].keys():
            if (kind := apart(ours[key], known[experiment][key])) in found:
                found[kind] += 1
    models = manifest.get("models", {})
    names = [str(model.get("name", "")) for model in models.values()] or ["4B-Base", "9B-Base"]
    if any(name.startswith("random weights") for name in names):
        lines.insert(0, "The models have random weights: sizes and times are proven, scores mean nothing.")
    elif names[0].endswith("4B-Base") and names[1].endswith("9B-Base"):  # else another pair was published
        lines.append(
            f"Of {sum(found.values())} figures that have a published interval, {found['overlap']} overlap with it "
            f"and {found['apart']} lie apart from it."
        )
    return lines


def selection(found: Mapping[str, Any]) -> Section:
    """The plan, its rivals and the rule."""
    ties = set(found["ties"])
    rows = tuple(
        (plan, interval(excess, 4), "chosen" if plan == found["plan"] else "tie" if plan in ties else "")
        for plan, excess in found["excess"].items()
    )
    chosen = frozenset({[row[0] for row in rows].index(found["plan"])})
    return Section(
        "Which plan, and why",
        (
            f"{found['reason']} The rule: the smallest mean excess wins, all plans within {found['tie_width']:g} nat "
            "of it are ties, and among ties the one that translates the fewest components.",
        ),
        (),
        (Table(("plan", "excess on validation documents", ""), rows, frozenset({0, 2}), chosen),),
    )


def restore_gate(results: Mapping[str, Any]) -> Gate:
    """The restore control as a gate."""
    rows = []
    for end, result in results.items():
        worst = max(row["max_difference"] for row in result["lengths"])
        failed = [check["name"] for check in result["checks"] if not check["passed"]]
        said = f"{end}: maximum logit difference is 0, and every further check holds"
        measured = f"{worst:g}" + (f", failed: {', '.join(failed)}" if failed else "")
        rows.append((said, measured, "pass" if result["passed"] else "fail"))
    whole = "pass" if all(result["passed"] for result in results.values()) else "fail"
    return Gate("restore control", "a captured and restored state is the same state", whole, tuple(rows))


def restore(results: Mapping[str, Any]) -> Section:
    """The restore control by model and length."""
    rows = tuple(
        (
            end,
            f"{row['length']:,}",
            str(row["contexts"]),
            f"{100 * row['top1']:.2f} %",
            f"{row['max_difference']:g}",
        )
        for end, result in results.items()
        for row in result["lengths"]
    )
    checks = tuple(
        (end, check["name"], "pass" if check["passed"] else "fail", check["detail"])
        for end, result in results.items()
        for check in result["checks"]
    )
    return Section(
        "Restore control",
        (
            "The same model reads a prefix, its state is captured and restored, and it goes on as if nothing were.",
        ),
        (),
        (
            Table(("model", "prefix", "contexts", "top-1", "max logit difference"), rows),
            Table(("model", "check", "verdict", "measured"), checks, words=frozenset({0, 1, 2, 3})),
        ),
    )


def domains(runs: Mapping[str, Run]) -> Section:
    """Experiment 2 beside other domains and lengths."""
    rows = []
    for name, run in runs.items():
        own, less = run.result["arms"][run.handover], run.result["differences"]
        rows.append(
            (
                name,
                f"{run.config.prefix:,}",
                str(run.result["documents"]),
                interval(own["excess"]),
                interval(own["ncr"], 2) if "ncr" in own else "",
                interval(less["handover − source"], sign=True) if "handover − source" in less else "",
                ", ".join(f"{gate}: {found['verdict']}" for gate, found in run.result["gates"].items()),
            )
        )
    header = ("documents of", "prefix", "number", "excess", "NCR", "minus source", "gates")
    return Section(
        "Other domains and lengths",
        ("The same bridge, nothing chosen or fitted again.",),
        (),
        (Table(header, tuple(rows), words=frozenset({0, 6})),),
    )


def branch(record: Mapping[str, Any] | None) -> Section | None:
    """Whether the branch with a longer prefix ran, and why."""
    if record is None or not record.get("finished"):
        return None
    found = record["outcome"]
    said = f"The gate {found['gate']!r} of experiment 2 came out as {found['verdict']}: the branch was "
    said += {"not run": "not run", "on request": "run on request all the same"}.get(found["status"], "run")
    return Section("The branch with a longer prefix", (f"{said}.",))


def costs(stages: Mapping[str, Any]) -> Section | None:
    """Time, memory, disk and speed of every stage."""
    rows = []
    for name, record in stages.items():
        if not record.get("finished"):
            continue
        cost = record["cost"]
        rows.append(
            (
                name + (" (resumed)" if record["resumed"] else ""),
                f"{cost['seconds']:,.1f}",
                f"{cost['source_tokens']:,}",
                f"{cost['receiver_tokens']:,}",
                f"{cost['tokens_per_second']:,.0f}",
                *(f"{cost[key] / 1e9:,.2f}" for key in ("device_bytes", "host_bytes", "disk_bytes")),
            )
        )
    if not rows:
        return None
    header = (
        "stage",
        "seconds",
        "source tokens",
        "receiver tokens",
        "tokens/s",
        "device, GB",
        "host, GB",
        "disk, GB",
    )
    said = "Peaks of the stage. The time of a resumed stage is that of its last part."
    return Section("What it cost", (said,), (), (Table(header, tuple(rows)),))


def identities(manifest: Mapping[str, Any]) -> Section:
    """Models, ground and documents."""
    both = frozenset({0, 1, 2})
    models = manifest["models"]
    keys = ("name", "revision", "model_type", "parameters", "weights")
    rows = tuple(
        (key, *(str(models[end].get(key, ""))[:64] for end in ("source", "receiver")))
        for key in keys
        if models
    )
    ground = {**manifest["environment"]}
    packages = ground.pop("packages", {})
    settings = tuple((key, str(value)) for key, value in (ground | packages).items())
    documents = tuple(
        (name, str(len(found)), *(list(found)[i] for i in (0, -1)))
        for name, found in manifest["documents"].items()
    )
    tables = (
        Table(("", "source", "receiver"), rows, words=both),
        Table(("set", "documents", "first", "last"), documents, words=frozenset({0, 2, 3})),
        Table(("environment", ""), settings, words=both),
    )
    said = (
        "manifest.json holds the rest: every setting and seed, every document with its digest, and the sha256 of "
        "every file. `statebridge report --verify` compares."
    )
    return Section("Whose numbers these are", (said,), (), tuple(table for table in tables if table.rows))
