"""Run the stages of a reproduction: each once, resumable, in a folder that belongs to one set of settings.

    RUN/stages/NAME.json   what a stage was asked for, from which inputs, what it cost, sha256 of what it left
    RUN/NAME/              what it left
    RUN/manifest.json      whose numbers these are
    RUN/report.html, .md   all of it for a reader

A finished stage is not run again; an unfinished one goes on where it was. Settings or inputs that differ from the
recorded ones are refused before anything runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from statebridge.bridge import ModelPair
from statebridge.bridge.collect import sole_run
from statebridge.errors import ConfigError
from statebridge.reproduce.config import SuiteConfig
from statebridge.reproduce.manifest import SCRATCH, digests, write_manifest
from statebridge.reproduce.measure import folder_bytes, measured
from statebridge.reproduce.plan import Expected, Sizes, expect
from statebridge.reproduce.report import write_suite_report
from statebridge.reproduce.stages import Context, Progress, Stage, read_json, stages_of, write_json

EXPERIMENTS = ("e001", "e002", "all")


def reproduce(
    config: SuiteConfig,
    experiment: str,
    out: str | Path,
    open_pair: Callable[[], ModelPair],
    *,
    progress: Progress = lambda what, done, total: None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run experiment 1, experiment 2 or both, from documents to report.

    Parameters
    ----------
    config
        Settings.
    experiment
        "e001", "e002" or "all".
    out
        The run's folder; an interrupted run there goes on, and another experiment joins what is there.
    open_pair
        Gives the models; called when a stage must run.
    progress
        Called with (what, done, total).
    say
        Called with one line before each stage: what it will hold.

    Returns
    -------
    dict
        The manifest of the run.

    Raises
    ------
    ConfigError
        When the experiment is unknown, the folder holds a run of other settings or files that a finished stage
        did not leave, another process works there, or the disk is too small.
    StatebridgeError
        What a stage raises; everything that was finished is kept.
    """
    if experiment not in EXPERIMENTS:
        raise ConfigError(f"There is no experiment {experiment!r}; use one of {', '.join(EXPERIMENTS)}.")
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    with sole_run(folder, int(os.environ.get("RANK", "0"))):  # before models that take minutes to load
        return _reproduce(config, experiment, folder, open_pair, progress, say)


def _reproduce(
    config: SuiteConfig,
    experiment: str,
    folder: Path,
    open_pair: Callable[[], ModelPair],
    progress: Progress,
    say: Callable[[str], None],
) -> dict[str, Any]:
    from accelerate import PartialState

    stages = stages_of(config, experiment)
    # also of stages that this experiment does not run, because one manifest speaks for the whole folder
    records = {stage.name: _claimed(folder, stage) for stage in stages_of(config, "all")}
    for stage in stages:
        if records[stage.name].get("finished"):
            _require_whole(folder, stage, records[stage.name])
            _require_inputs(folder, stage, records)
    context: Context | None = None
    if not all(records[stage.name].get("finished") for stage in stages):
        pair = open_pair()
        process = PartialState(cpu=pair.receiver.device.type == "cpu")
        context = Context(config, folder, pair, process, progress)
        expected = expect(config, Sizes.of(config))
    for stage in stages:
        if records[stage.name].get("finished"):
            _require_inputs(folder, stage, records)  # of which some may have been made just now
            say(f"{stage.name}: finished before, {records[stage.name]['cost']['seconds']:.0f} s")
            _remove_scratch(folder / stage.name)  # which a kill may have left
        else:
            assert context is not None, "opened for every unfinished stage"
            _require_inputs(folder, stage, records)
            say(announce(stage.name, expected[stage.name]))
            records[stage.name] = _run(context, stage, records, expected[stage.name])
    if context is not None and not context.main:
        return {}
    manifest = write_manifest(folder, config, context.pair if context else None)
    write_suite_report(folder)
    return manifest


def announce(name: str, expected: Expected) -> str:
    """One line on what a stage will read and hold."""
    words = [f"{name}: {expected.documents:,} documents"]
    if expected.receiver_tokens:
        words.append(
            f"{expected.source_tokens + expected.receiver_tokens + expected.trained_tokens:,} tokens through the "
            "models"
        )
    if expected.device_bytes:
        words.append(f"holds {size(expected.device_bytes)} of weights and states beside activations")
    words.append(f"{size(expected.disk_bytes)} on disk")
    return ", ".join(words)


def size(nbytes: float) -> str:
    """Bytes for readers."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:,.1f} {unit}"
    return f"{nbytes:.0f} B"


def _record(folder: Path, name: str) -> Path:
    return folder / "stages" / f"{name.replace('/', '.')}.json"


def _claimed(folder: Path, stage: Stage) -> dict[str, Any]:
    """What is recorded of a stage, {} when it never began; refuses other settings."""
    path = _record(folder, stage.name)
    try:
        record = read_json(path)
        found = record["settings"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is damaged ({error!r}); start in another folder.") from error
    if changed := sorted(_differences(stage.settings, found, "")):
        raise ConfigError(
            f"{folder} holds a run with another {', '.join(changed[:5])}; choose another --out, or give the settings "
            "that it was begun with."
        )
    return record


def _differences(ours: Any, theirs: Any, path: str) -> list[str]:
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return [] if ours == theirs else [path]
    return [
        line
        for key in dict.fromkeys((*ours, *theirs))
        for line in _differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else str(key))
    ]


def _require_inputs(folder: Path, stage: Stage, records: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a stage that was made, or begun, from another outcome of a finished one."""
    was = records[stage.name].get("inputs", {})
    known = {
        name: records[name]["digest"] for name in stage.needs if name in was and "digest" in records[name]
    }
    if changed := sorted(name for name in known if known[name] != was[name]):
        raise ConfigError(
            f"The stage {stage.name} in {folder} was made from another outcome of {', '.join(changed)}; delete "
            f"{_record(folder, stage.name)} and {folder / stage.name} to run it again."
        )


def _require_whole(folder: Path, stage: Stage, record: Mapping[str, Any]) -> None:
    """Refuse to build on files that a finished stage did not leave."""
    now = digests(folder, stage.name)
    for path, expected in record["artefacts"].items():
        if now.get(path) != expected:
            raise ConfigError(
                f"{folder / path} is {'another' if path in now else 'gone'} since the stage {stage.name} finished; "
                f"put it back, or delete {_record(folder, stage.name)} and {folder / stage.name} to run that again."
            )


def _remove_scratch(folder: Path) -> None:
    for scratch in SCRATCH:
        shutil.rmtree(folder / scratch, ignore_errors=True)


def _run(
    context: Context, stage: Stage, records: Mapping[str, Mapping[str, Any]], expected: Expected
) -> dict[str, Any]:
    folder = context.folder / stage.name
    path = _record(context.folder, stage.name)
    begun = bool(records[stage.name])
    inputs = {name: records[name]["digest"] for name in stage.needs}
    record = {"stage": stage.name, "settings": stage.settings, "inputs": inputs, "finished": False}
    folder.mkdir(parents=True, exist_ok=True)
    context.process.wait_for_everyone()
    _require_room(folder, stage.name, expected)
    if context.main:
        write_json(path, record)
    with measured(context.pair) as cost:
        noted = stage.run(context)
    context.process.wait_for_everyone()
    if not context.main:
        # the main process ends the record; its digest is what the next stages compare
        context.process.wait_for_everyone()
        return read_json(path)
    cost.disk_bytes = folder_bytes(folder)
    artefacts = digests(context.folder, stage.name)
    record |= {
        "finished": True,
        "resumed": begun,
        "outcome": noted,
        "cost": cost.as_dict(),
        "processes": context.process.num_processes,
        "artefacts": artefacts,
        "digest": _outcome_digest(artefacts),
    }
    write_json(path, record)
    _remove_scratch(folder)
    context.process.wait_for_everyone()
    return record


def _outcome_digest(artefacts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(sorted(artefacts.items()))).encode()).hexdigest()


def _require_room(folder: Path, name: str, expected: Expected) -> None:
    free, there = shutil.disk_usage(folder).free, folder_bytes(folder)
    if expected.disk_bytes > free + there:
        raise ConfigError(
            f"The stage {name} needs {size(expected.disk_bytes)} on disk and {folder} has {size(free + there)}; "
            "choose another --out, or fewer documents."
        )
