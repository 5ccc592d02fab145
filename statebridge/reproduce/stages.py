"""The stages of a run: each reads what earlier ones left in the run's folder, and leaves its own.

    documents   every set, drawn once and stored as tokens
    restore     the restore control on both models
    fit         all maps (experiment 1)                                -> fit/bridge
    e001        full translation (plan TTT) against all its controls
    selection   the eight plans on validation documents                -> selection.json
    calibrate   residuals on top of the chosen plan (experiment 2)     -> calibrate/bridge
    e002        the calibrated bridge on fresh documents
    shifted/…   the same on other domains
    long        the same with a longer prefix, behind its gate

A stage says which settings decide what it leaves; when it runs and whether it must is the suite's business.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from statebridge.bridge import Bridge, ModelPair, TokenWindow, fit_bridge, fit_calibrator
from statebridge.bridge.paired import Split
from statebridge.evaluate.config import EvaluateConfig
from statebridge.evaluate.report import load_run, write_report
from statebridge.evaluate.restore_control import NEXT_TOKENS, restore_control
from statebridge.evaluate.run import evaluate
from statebridge.reproduce.config import SuiteConfig
from statebridge.reproduce.documents import Sets, draw, store, stored
from statebridge.reproduce.figures import choose
from statebridge.state.atomic import atomic_file

Progress = Callable[[str, int, int], None]
FULL = "TTT"  # experiment 1 hands over the full translation


@dataclass
class Context:
    """What a stage works with.

    Attributes
    ----------
    config
        Settings of the run.
    folder
        The run's folder.
    pair
        The models.
    process
        accelerate's `PartialState`.
    progress
        Called with (what, done, total).
    """

    config: SuiteConfig
    folder: Path
    pair: ModelPair
    process: Any
    progress: Progress

    @cached_property
    def sets(self) -> Sets:
        """The document sets, as they were drawn."""
        return stored(self.folder / "documents", tuple(self.config.sets()))

    @property
    def main(self) -> bool:
        """Whether this process writes what is written once."""
        return bool(self.process.is_main_process)

    @property
    def plan(self) -> str:
        """The plan that was chosen."""
        return str(read_json(self.folder / "selection" / "selection.json")["plan"])

    def bridge(self, stage: str) -> Bridge:
        """The bridge that a stage left."""
        return Bridge.from_pretrained(self.folder / stage / "bridge")


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes
    ----------
    name
        Also of its folder.
    needs
        Stages whose results it reads.
    settings
        Everything of the config that decides what it leaves.
    run
        Does it; gives what the record keeps beside the costs.
    """

    name: str
    needs: tuple[str, ...]
    settings: Mapping[str, Any]
    run: Callable[[Context], Mapping[str, Any]] = field(repr=False)


def stages_of(config: SuiteConfig, experiment: str) -> list[Stage]:
    """The stages of "e001", "e002" or "all", in order."""
    plain = json.loads(json.dumps(dataclasses.asdict(config)))
    models = {key: value for key, value in plain["models"].items() if key != "load"}  # where, not what
    sets = config.sets()
    requests = {name: dataclasses.asdict(request) for name, request in sets.items()}
    found = [
        Stage("documents", (), {"sets": json.loads(json.dumps(requests)), "models": models}, _documents),
        Stage("restore", ("documents",), {"restore": plain["restore"]}, _restore),
        Stage("fit", ("documents",), {"fit": plain["fit"]}, _fit),
    ]
    if experiment != "e002":
        found.append(
            Stage("e001", ("documents", "fit"), {"e001": plain["e001"]}, _evaluation("e001", config.e001))
        )
    if experiment == "e001":
        return found
    calibrate = {key: value for key, value in plain["calibrate"].items() if key != "states"}  # where, again
    chosen = {"selection": plain["selection"], "tie_width": config.tie_width}
    scored = ("documents", "calibrate")
    found += [
        Stage("selection", ("documents", "fit"), chosen, _selection),
        Stage("calibrate", ("documents", "fit", "selection"), {"calibrate": calibrate}, _calibrate),
        Stage("e002", scored, {"e002": plain["e002"]}, _evaluation("e002", config.e002)),
    ]
    for name in config.shifted:
        settings = config.shifted_settings(name)
        own = json.loads(json.dumps(dataclasses.asdict(settings)))
        found.append(Stage(f"shifted/{name}", scored, {f"shifted.{name}": own}, _evaluation(name, settings)))
    if config.long is not None:
        own = {"long": plain["long"], "e002": plain["e002"]}
        found.append(Stage("long", (*scored, "e002"), own, _long))
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as temporary:
        text = json.dumps(value, indent=1, ensure_ascii=False)
        temporary.write_text(text + "\n", encoding="utf-8")


def _documents(context: Context) -> dict[str, Any]:
    if context.main:
        requests = context.config.sets()
        context.progress("draw documents", 0, len(requests))
        store(draw(requests, context.pair.tokenizer), context.folder / "documents")
        context.progress("draw documents", len(requests), len(requests))
    context.process.wait_for_everyone()
    return {}


def _restore(context: Context) -> dict[str, Any]:
    from accelerate.utils import gather_object

    control, process = context.config.restore, context.process
    length = max(control.lengths) + NEXT_TOKENS
    windows = context.sets["fit"][: control.contexts]
    contexts = torch.stack([window.ids[:length] for window in windows])
    mine = ("source", "receiver")[process.process_index :: process.num_processes]
    total, done = len(mine) * len(contexts) * len(control.lengths), 0

    def step() -> None:
        nonlocal done
        done += 1
        context.progress("restore control", done, total)

    found = []
    for end in mine:
        result = restore_control(getattr(context.pair, end), contexts, control.lengths, step=step)
        found.append((end, dataclasses.asdict(result) | {"passed": result.passed}))
    results = dict(sorted(gather_object(found), reverse=True))
    if context.main:
        write_json(context.folder / "restore" / "restore.json", results)
    return {"passed": all(result["passed"] for result in results.values())}


def _fit(context: Context) -> dict[str, Any]:
    folder = context.folder / "fit"
    bridge = fit_bridge(
        context.pair,
        context.sets["fit"],
        context.config.fit,
        work_dir=folder / "work",
        progress=context.progress,
    )
    if context.main:
        bridge.save_pretrained(folder / "bridge")
    return {}


def _evaluation(name: str, settings: EvaluateConfig) -> Callable[[Context], dict[str, Any]]:
    def run(context: Context) -> dict[str, Any]:
        if name == "e001":
            return _evaluate(context, context.bridge("fit").with_plan(FULL), name, settings, name)
        where = name if name == "e002" else f"shifted/{name}"
        return _evaluate(context, context.bridge("calibrate"), name, settings, where)

    return run


def _evaluate(
    context: Context, bridge: Bridge, name: str, settings: EvaluateConfig, where: str
) -> dict[str, Any]:
    result = evaluate(
        context.pair,
        bridge,
        dataclasses.replace(settings, skip=0),  # what is skipped was left out when the set was drawn
        out=context.folder / where,
        documents=context.sets[name],
        progress=context.progress,
    )
    if context.main:
        write_report(context.folder / where)
    return {"gates": {gate: found["verdict"] for gate, found in result["gates"].items()}}


def _selection(context: Context) -> dict[str, Any]:
    config = context.config
    found = _evaluate(context, context.bridge("fit"), "selection", config.selection, "selection")
    if context.main:
        folder = context.folder / "selection"
        write_json(folder / "selection.json", choose(load_run(folder), config.tie_width))
    context.process.wait_for_everyone()
    return found | {"plan": context.plan}


def _calibrate(context: Context) -> dict[str, Any]:
    config, folder = context.config, context.folder / "calibrate"
    windows: dict[Split, Sequence[TokenWindow]] = {
        "fit": context.sets["fit"][config.fit.validation_documents :],
        "validation": context.sets["selection"],
    }
    bridge = fit_calibrator(
        context.pair,
        context.bridge("fit").with_plan(context.plan),
        # the sets are known to be disjoint, their file names need not be
        {
            split: [dataclasses.replace(w, id=f"{split}/{w.id}") for w in found]
            for split, found in windows.items()
        },
        config.calibrate,
        work_dir=folder / "work",
        progress=context.progress,
    )
    if context.main:
        bridge.save_pretrained(folder / "bridge")
    return {"chosen": bridge.config.calibration["chosen"]}


def _long(context: Context) -> dict[str, Any]:
    long = context.config.long
    assert long is not None, "the stage exists where the settings have it"
    gates = read_json(context.folder / "e002" / "result.json")["gates"]
    verdict = gates[long.behind]["verdict"] if long.behind in gates else "not measured"
    noted = {"gate": long.behind, "verdict": verdict}
    if verdict != "pass" and not long.on_request:
        return noted | {"status": "not run"}
    settings = context.config.long_settings(long)
    found = _evaluate(context, context.bridge("calibrate"), "long", settings, "long")
    return found | noted | {"status": "behind its gate" if verdict == "pass" else "on request"}
