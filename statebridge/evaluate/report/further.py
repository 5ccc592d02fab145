"""The report's sections about further measurements; each is None for a run that does not hold it."""

from __future__ import annotations

from statebridge.evaluate.palette import label
from statebridge.evaluate.report import plots_sections
from statebridge.evaluate.report.blocks import Picture, Section, Table
from statebridge.evaluate.report.data import Run
from statebridge.evaluate.report.words import interval, number


def sections(run: Run) -> tuple[Section | None, ...]:
    """Calibrator, recall, generation and branches, in this order."""
    return (calibration_section(run), residuals_section(run), _recall(run), _generation(run), _branches(run))


def calibration_section(run: Run) -> Section | None:
    """Curves, choice and ablation of a calibrator."""
    picture = plots_sections.calibration(run)
    if picture is None:
        return None
    found = run.result["bridge"]["calibration"]
    chosen = found["chosen"]
    kl = {name: sum(values) / len(values) for name, values in found["validation_kl"].items()}
    words = {"plan": "the plan alone", "calibrated": "with the calibrator"}
    rows = tuple(
        (words.get(name, name.replace("without", "calibrator without its part for")), number(value, 4))
        for name, value in kl.items()
    )
    documents = len(next(iter(found["validation_kl"].values())))
    said = (
        f"The calibrator has {found['trainable_values']:,} trained values. Of the grid, rank {chosen['rank']} with "
        f"penalty weight {chosen['penalty']:g} was chosen at step {chosen['step']:,}, by the KL divergence from the "
        f"native receiver on {documents} validation documents."
    )
    if chosen["step"] == 0:
        said += " No step of any grid point improved it, so the calibrator leaves every state as it is."
    return Section(
        "How the calibrator was trained",
        (said,),
        (Picture("calibration", "Validation KL by training step", picture),),
        (Table(("on the validation documents", "KL, nats"), rows),),
    )


def residuals_section(run: Run) -> Section | None:
    """How far a calibrator moves each layer."""
    picture = plots_sections.residuals(run)
    if picture is None:
        return None
    rows = run.result["residuals"]
    largest = max(rows, key=lambda row: row["mean"])
    said = (
        f"Relative change of the state by the calibrator, {len(rows)} tensors: the largest is "
        f"{100 * largest['mean']:.2f} % in layer {largest['layer']}."
    )
    return Section("How far the calibrator moves the state", (said,), (Picture("residuals", said, picture),))


def _recall(run: Run) -> Section | None:
    picture = plots_sections.recall(run)
    if picture is None:
        return None
    found = run.result["recall"]
    depths = list(next(iter(found.values())))
    rows = tuple(
        (label(arm, run.handover), *(f"{100 * by[d]['estimate']:.0f} %" for d in depths))
        for arm, by in found.items()
    )
    return Section(
        "Recall by depth",
        (
            f"Made-up facts stand in the prefix and are asked for after it, {run.config.recall.items_per_depth} "
            "questions a depth; the whole answer must come out. Bars are 95 % Wilson intervals.",
        ),
        (Picture("recall", "Share of facts recalled by depth", picture),),
        (Table(("arm", *(f"{int(d):,}" for d in depths)), rows),),
    )


def _generation(run: Run) -> Section | None:
    picture = plots_sections.generation(run)
    if picture is None:
        return None
    found = run.result["generation"]
    rows = tuple(
        (
            mode,
            label(arm, run.handover),
            interval(value["agreement"], 2),
            interval(value["divergence"], 1),
            f"{value['identical']} of {value['agreement']['n']}",
        )
        for mode, by_arm in found.items()
        for arm, value in by_arm.items()
    )
    header = ("mode", "arm", "agreement", "first difference", "identical")
    table = run.tables["generation"].to_pylist()
    first = table[0]["document"]
    texts = tuple(
        (label(row["arm"], run.handover), " ".join(row["text"].split()))
        for row in table
        if row["document"] == first and row["mode"] == "greedy"
    )
    return Section(
        "Free-running generation",
        (
            f"Every arm writes {run.config.generation.new_tokens} tokens of its own after the bridge token and is "
            "compared with what native writes. Sampled arms share their random numbers, so that only the state can "
            "make a difference.",
        ),
        (Picture("generation", "Agreement with native's own writing", picture),),
        (
            Table(header, rows, words=frozenset({0, 1})),
            Table(("arm", f"greedy continuation of {first}"), texts, words=frozenset({0, 1})),
        ),
    )


def _branches(run: Run) -> Section | None:
    noted = run.result.get("branches")
    if not noted:
        return None
    runs = run.branches()
    rows = []
    for name, branch in noted.items():
        inner = runs.get(name)
        state = branch["status"] if name not in runs or inner else f"{branch['status']}, not finished"
        own = inner.result["arms"][inner.handover] if inner else None
        rows.append(
            (
                name,
                f"{branch['prefix']:,}",
                f"{branch['behind']}: {branch['gate']}",
                state,
                interval(own["excess"]) if own else "",
                interval(own["ncr"], 2) if own and "ncr" in own else "",
            )
        )
    return Section(
        "Further protocols",
        (
            "Each runs only when its gate passes, or on request, which says nothing about the gate. Its own report "
            "lies in its folder under branches/.",
        ),
        (),
        (
            Table(
                ("branch", "prefix", "gate", "run", "excess", "NCR"), tuple(rows), words=frozenset({0, 2, 3})
            ),
        ),
    )
