"""Run an evaluation: every arm on every document, kept per document, arm and position.

A run is a folder: `config.yaml`, `scores.parquet` (one row per document, arm and position), `result.json`.
Each batch of documents is written when it is done, so an interrupted run goes on; several processes share the
batches. A folder with other settings, models or documents is refused.
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
import yaml

from statebridge.bridge import Bridge, Document, ModelPair, load_documents, token_windows, tokenizer_digest
from statebridge.capture.model import backend_of
from statebridge.errors import ConfigError
from statebridge.evaluate.arms import ArmScores, Protocol, score_arms
from statebridge.evaluate.config import EvaluateConfig
from statebridge.evaluate.summary import summarise
from statebridge.state.atomic import atomic_file

METRICS = ("nll", "top1", "kl", "js")
Progress = Callable[[str, int, int], None]


def evaluate(
    pair: ModelPair,
    bridge: Bridge,
    config: EvaluateConfig | None = None,
    *,
    out: str | Path,
    documents: Iterable[Document] | None = None,
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
    """
    from accelerate import PartialState

    config = config or EvaluateConfig()
    _check(config)
    process = PartialState()
    folder = Path(out)
    protocol = Protocol(config.prefix, config.targets)
    windows = token_windows(
        load_documents(config.documents) if documents is None else documents,
        pair.tokenizer,
        protocol.length,
        config.skip + config.count,
        config.documents.window,
        config.seed,
    )[config.skip :]
    provenance = _provenance(pair, bridge, [window.id for window in windows])
    _claim(folder, config, provenance, process.is_main_process)
    process.wait_for_everyone()
    # a last document of its own would have no other's state as its wrong donor
    size = config.batch_size
    starts = list(range(0, len(windows), size))
    if len(windows) % size == 1:
        starts.pop()
    jobs = [(a, b) for a, b in zip(starts, [*starts[1:], len(windows)], strict=True)]
    mine = jobs[process.process_index :: process.num_processes]
    for done, (first, last) in enumerate(mine):
        progress("score", sum(b - a for a, b in mine[:done]), sum(b - a for a, b in mine))
        part = folder / "parts" / f"{first:06d}.parquet"
        if not part.exists():
            batch = windows[first:last]
            scores = score_arms(
                pair,
                torch.stack([window.ids for window in batch]),
                protocol,
                bridge=bridge,
                plans=config.plans,
                windows=config.windows,
                handover_windows=config.handover_windows,
                controls=config.controls,
            )
            with atomic_file(part) as temporary:
                pq.write_table(_rows([window.id for window in batch], scores), temporary)
    progress("score", len(windows), len(windows))
    process.wait_for_everyone()
    table = pa.concat_tables([pq.read_table(folder / "parts" / f"{first:06d}.parquet") for first, _ in jobs])
    result = summarise(table, bridge.config.plan, config) | {"provenance": provenance}
    if process.is_main_process:
        with atomic_file(folder / "scores.parquet") as temporary:
            pq.write_table(table, temporary)
        with atomic_file(folder / "result.json") as temporary:
            temporary.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return result


def _check(config: EvaluateConfig) -> None:
    if config.count < 2 or config.batch_size < 2:
        raise ConfigError(
            "count and batch_size must be at least 2: the wrong donor is another document of the batch."
        )
    widest = max((*config.windows, *config.handover_windows), default=0)
    if widest >= config.prefix:
        raise ConfigError(f"windows: {widest} tokens are not fewer than the prefix of {config.prefix}.")
    needed = {
        metric.split(" − ")[-1] for gate in config.gates.values() for g in gate for metric in [g.metric]
    }
    missing = (needed & {"source", "kv only", "gdn only", "wrong donor"}) - set(config.controls)
    if missing:
        raise ConfigError(f"gates need the arms {', '.join(sorted(missing))}; add them to controls.")


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


def _provenance(pair: ModelPair, bridge: Bridge, documents: list[str]) -> dict[str, Any]:
    return {
        "source": {"name": pair.source_identity.name, "weights": pair.source_identity.weights},
        "receiver": {"name": pair.receiver_identity.name, "weights": pair.receiver_identity.weights},
        "tokenizer": tokenizer_digest(pair.tokenizer),
        "plan": bridge.config.plan,
        "backend": {
            "source": dict(backend_of(pair.source)),
            "receiver": dict(backend_of(pair.receiver)),
        },
        "documents": documents,
    }


def _claim(folder: Path, config: EvaluateConfig, provenance: dict[str, Any], main: bool) -> None:
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    content = json.loads(json.dumps({"evaluate": dataclasses.asdict(config), "provenance": provenance}))
    path = folder / "config.yaml"
    if path.exists():
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
        for part in ("evaluate", "provenance"):
            old = found.get(part, {}) if isinstance(found, dict) else {}
            changed = sorted(
                k for k in content[part].keys() | old.keys() if content[part].get(k) != old.get(k)
            )
            if changed:
                raise ConfigError(
                    f"{folder} holds a run with another {', '.join(changed)}; choose another folder or delete it."
                )
    elif main:
        with atomic_file(path) as temporary:
            temporary.write_text(
                yaml.safe_dump(content, sort_keys=False, allow_unicode=True), encoding="utf-8"
            )
