"""Run an evaluation: every arm on every document, kept per document, arm and position.

A run is a folder: `config.yaml`, `scores.parquet` (one row per document, arm and position), a table for each
further section, `result.json`, and one folder under `branches/` for each further protocol. Each batch of
documents is written when it is done, so an interrupted run goes on; several processes share the batches. A
folder with other settings, models or documents is refused.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from statebridge.bridge import (
    Bridge,
    Document,
    ModelPair,
    TokenWindow,
    load_documents,
    token_windows,
)
from statebridge.errors import StatebridgeError
from statebridge.evaluate.arms import ArmScores, Protocol, batches, score_arms
from statebridge.evaluate.check import check
from statebridge.evaluate.config import BranchConfig, EvaluateConfig, GenerationConfig, RecallConfig
from statebridge.evaluate.provenance import claim, environment, provenance_of, training_of
from statebridge.evaluate.sections import Section, further_sections
from statebridge.evaluate.summary_run import summarise_run
from statebridge.state.atomic import atomic_file

METRICS = ("nll", "top1", "kl", "js")
Progress = Callable[[str, int, int], None]


def evaluate(
    pair: ModelPair,
    bridge: Bridge,
    config: EvaluateConfig | None = None,
    *,
    out: str | Path,
    documents: Iterable[Document | TokenWindow] | None = None,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Score every arm on every document and write the run's folder.

    Parameters
    ----------
    pair, bridge
        The models and their bridge; `bridge.config.plan` is the hand-over that gates are about.
    config
        Settings; the published protocol when left out.
    out
        The run's folder; an interrupted run there goes on.
    documents
        Documents in order; those of `config.documents` when left out.
    progress
        Called with (stage, done, total).

    Returns
    -------
    dict
        The content of `result.json`: intervals by arm, differences, gates, provenance.

    Raises
    ------
    DocumentError
        When there are too few documents that are long enough.
    ConfigError
        When the settings contradict themselves or the folder holds another run.
    StateMismatch
        When the bridge is for another pair, or a plan cannot be carried out.
    StatebridgeError
        When an arm scores NaN; names the arm and the document.
    """
    from accelerate import PartialState

    config = config or EvaluateConfig()
    hand = check(pair, bridge, config)
    process = PartialState()
    folder = Path(out)
    # kept, because a branch reads the documents again
    documents = None if documents is None else list(documents)
    windows = token_windows(
        load_documents(config.documents) if documents is None else documents,
        pair.tokenizer,
        Protocol(config.prefix, config.targets).length,
        config.skip + config.count,
        config.documents.window,
        config.seed,
    )[config.skip :]
    sections = [
        _scores(pair, bridge, config, windows),
        *further_sections(pair, bridge, config, windows),
    ]
    provenance = provenance_of(pair, bridge, [window.id for window in windows])
    claim(folder, config, provenance, process.is_main_process)
    process.wait_for_everyone()
    tables = {section.name: _table(section, folder, process, progress) for section in sections}
    result = summarise_run(tables, hand, config) | {
        "bridge": training_of(bridge),
        "environment": environment(process.num_processes),
        "provenance": provenance,
    }
    if process.is_main_process:
        for name, table in tables.items():
            with atomic_file(folder / f"{name}.parquet") as temporary:
                pq.write_table(table, temporary)
        with atomic_file(folder / "result.json") as temporary:
            temporary.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for branch in config.branches:
        if result["branches"][branch.name]["status"] != "not run":
            settings, where = _branch(config, branch), folder / "branches" / branch.name
            evaluate(pair, bridge, settings, out=where, documents=documents, progress=progress)
    return result


def _scores(pair: ModelPair, bridge: Bridge, config: EvaluateConfig, windows: list[TokenWindow]) -> Section:
    def compute(first: int, last: int) -> pa.Table:
        names = [window.id for window in windows[first:last]]
        scores = score_arms(
            pair,
            torch.stack([window.ids for window in windows[first:last]]),
            Protocol(config.prefix, config.targets),
            bridge=bridge,
            plans=config.plan_names,
            windows=config.windows,
            handover_windows=config.handover_windows,
            controls=config.controls,
        )
        for arm, found in scores.items():
            if bool((bad := ~torch.isfinite(found.nll).all(1)).any()):
                document = names[int(bad.int().argmax())]
                raise StatebridgeError(
                    f"The arm {arm} scores NaN or infinity on the document {document!r}; look for NaN in its state "
                    "or its model, or use another dtype. Batches that were done are kept."
                )
        return _rows(names, scores)

    return Section("scores", batches(len(windows), config.batch_size), compute)


def _table(section: Section, folder: Path, process: Any, progress: Progress) -> pa.Table:
    """Compute this process's share of a section's batches; give the batches of all."""
    parts = folder / "parts" / section.name
    parts.mkdir(parents=True, exist_ok=True)
    mine = section.jobs[process.process_index :: process.num_processes]
    total = sum(last - first for first, last in mine)
    done = 0
    for first, last in mine:
        progress(section.name, done, total)
        part = parts / f"{first:06d}.parquet"
        if not part.exists():
            table = section.compute(first, last)
            with atomic_file(part) as temporary:
                pq.write_table(table, temporary)
        done += last - first
    progress(section.name, done, total)
    process.wait_for_everyone()
    return pa.concat_tables([pq.read_table(parts / f"{first:06d}.parquet") for first, _ in section.jobs])


def _branch(config: EvaluateConfig, branch: BranchConfig) -> EvaluateConfig:
    """The settings of a branch: its lengths, the arms of the main run, no sections and no further branches."""
    return dataclasses.replace(
        config,
        prefix=branch.prefix,
        targets=branch.targets or config.targets,
        count=branch.count or config.count,
        recall=RecallConfig(),
        generation=GenerationConfig(),
        branches=(),
    )


def _rows(documents: list[str], scores: Mapping[str, ArmScores]) -> pa.Table:
    names: list[str] = []
    arms: list[str] = []
    positions: list[int] = []
    columns: dict[str, list[float]] = {metric: [] for metric in METRICS}
    for arm, found in scores.items():
        for row, document in enumerate(documents):
            count = found.nll.shape[1]
            names += [document] * count
            arms += [arm] * count
            positions += range(count)
            for metric in METRICS:
                columns[metric] += getattr(found, metric)[row].tolist()
    return pa.table({"document": names, "arm": arms, "position": positions, **columns})
