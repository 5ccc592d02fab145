"""The check that a run is what it says: every digest, every figure, and that its parts belong together.

    digests     every file against the manifest           records    every stage against the manifest
    figures     recomputed from the stored scores         settings   those of the manifest's config, everywhere
    verdicts    gates, plan and restore control, followed from the results that they are drawn from

Knows a run's folder alone, no models. It finds what does not fit; whoever makes everything fit, scores included, has
made another run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from statebridge.config import parse_config
from statebridge.errors import ConfigError, StatebridgeError
from statebridge.evaluate.config import EvaluateConfig
from statebridge.evaluate.report import Run, load_run, verify
from statebridge.evaluate.report.data import differences
from statebridge.reproduce.config import SuiteConfig
from statebridge.reproduce.figures import choose, figures_of
from statebridge.reproduce.manifest import MANIFEST, digests, document_digests
from statebridge.reproduce.stages import read_json, stages_of

_Lines = Iterator[str]


def verify_suite(folder: Path) -> list[str]:
    """One line for everything that is not as the manifest says; empty for a run that can be trusted.

    Raises
    ------
    ConfigError
        When the manifest holds no settings of a run.
    """
    manifest = read_json(folder / MANIFEST)
    config = parse_config(SuiteConfig, manifest["config"], str(folder / MANIFEST))
    checks: list[Callable[[], _Lines]] = [
        lambda: _files(folder, manifest),
        lambda: _records(folder, manifest),
        lambda: _settings(config, manifest),
        lambda: _documents(folder, config, manifest),
        lambda: _selection(folder, config),
        lambda: _restore(folder),
        lambda: _compare("figures", manifest["figures"], figures_of(folder)),
    ]
    for path in sorted([*folder.glob("*/result.json"), *folder.glob("shifted/*/result.json")]):
        name = str(path.parent.relative_to(folder))
        checks.append(lambda name=name: _evaluation(folder, name, config, manifest))  # type: ignore[misc]
    found: list[str] = []
    for check in checks:
        try:
            found += check()
        except StatebridgeError as error:  # a damaged file, which the error names
            found.append(str(error))
    return list(dict.fromkeys(found))


def _files(folder: Path, manifest: Mapping[str, Any]) -> _Lines:
    for name, record in manifest["stages"].items():
        if not record["finished"]:
            yield f"{name}: not finished"
            continue
        now = digests(folder, name)
        for path, expected in record["artefacts"].items():
            if path not in now:
                yield f"{path}: missing"
            elif now[path] != expected:
                yield f"{path}: its sha256 is not that of the manifest"
        yield from (f"{path}: not in the manifest" for path in now if path not in record["artefacts"])


def _records(folder: Path, manifest: Mapping[str, Any]) -> _Lines:
    names = {name.replace("/", "."): name for name in manifest["stages"]}
    there = {path.stem: path for path in sorted((folder / "stages").glob("*.json"))}
    yield from (f"stages/{stem}.json: missing" for stem in names if stem not in there)
    for stem, path in there.items():
        if stem not in names:
            yield f"stages/{stem}.json: not in the manifest"
            continue
        try:
            record = read_json(path)
        except (OSError, ValueError):
            yield f"stages/{stem}.json: damaged"
            continue
        if record != manifest["stages"][names[stem]]:
            yield f"stages/{stem}.json: not as in the manifest"


def _settings(config: SuiteConfig, manifest: Mapping[str, Any]) -> _Lines:
    wanted = {stage.name: stage.settings for stage in stages_of(config, "all")}
    for name, record in manifest["stages"].items():
        if json.loads(json.dumps(wanted.get(name))) != record["settings"]:
            yield f"{name}: its settings are not those of the manifest's config"


def _documents(folder: Path, config: SuiteConfig, manifest: Mapping[str, Any]) -> _Lines:
    if "documents" in manifest["stages"]:
        yield from _compare("documents", manifest["documents"], document_digests(folder, config))


def _selection(folder: Path, config: SuiteConfig) -> _Lines:
    path = folder / "selection" / "selection.json"
    if path.exists():
        yield from _compare(
            "selection", _read(path), choose(load_run(folder / "selection"), config.tie_width)
        )


def _restore(folder: Path) -> _Lines:
    path = folder / "restore" / "restore.json"
    for end, result in (_read(path) if path.exists() else {}).items():
        exact = all(row["top1"] == 1 and row["max_difference"] == 0 for row in result["lengths"])
        if result["passed"] and not (exact and all(check["passed"] for check in result["checks"])):
            yield f"restore: {end} is said to have passed and did not"


def _evaluation(folder: Path, name: str, config: SuiteConfig, manifest: Mapping[str, Any]) -> _Lines:
    run = load_run(folder / name)
    yield from (f"{name}: {line}" for line in verify(run))
    if name not in manifest["stages"]:
        return  # the published scores, which no stage made
    if run.config != dataclasses.replace(_evaluated(config, name), skip=0):
        yield f"{name}: its settings are not those of the manifest's config"
    made = run.result["provenance"]
    for end, model in manifest["models"].items():
        if model["weights"] != made[end]["weights"]:
            yield f"{end}: its weights are not those that {name} was measured with"
    if made["documents"] != list(manifest["documents"][name.rpartition("/")[2]]):
        yield f"{name}: its documents are not those of the manifest"
    yield from _verdicts(folder, name, run, manifest["stages"][name].get("outcome", {}))


def _verdicts(folder: Path, name: str, run: Run, outcome: Mapping[str, Any]) -> _Lines:
    gates = {gate: found["verdict"] for gate, found in run.result["gates"].items()}
    if gates != outcome.get("gates"):
        yield f"{name}: its gates came out as {gates}, and the manifest says {outcome.get('gates')}"
    chosen = folder / "selection" / "selection.json"
    if name not in ("e001", "selection") and chosen.exists():
        plan, done = _read(chosen)["plan"], run.result["provenance"]["plan"]
        if plan != done:
            yield f"{name}: carried out the plan {done}, and the plan {plan} was chosen"


def _evaluated(config: SuiteConfig, name: str) -> EvaluateConfig:
    if name == "long":
        if config.long is None:
            raise ConfigError("The manifest's config has no longer prefix, and the run holds one.")
        return config.long_settings(config.long)
    if name.startswith("shifted/"):
        return config.shifted_settings(name.removeprefix("shifted/"))
    found: EvaluateConfig = getattr(config, name)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise StatebridgeError(f"{path} is damaged ({error}).") from error


def _compare(what: str, stored: Any, again: Any) -> _Lines:
    yield from (f"{what}: {line}" for line in differences(stored, again))
