"""Fit a bridge: collect paired states of documents, fit every map, freeze them under a plan.

All maps are fitted whatever the plan says, so that any plan can be tried later without another pass over the
documents.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from statebridge.bridge.bridge import Bridge, BridgeConfig
from statebridge.bridge.collect import PairedStates, Progress, Split, collect
from statebridge.bridge.config import FitConfig
from statebridge.bridge.documents import Document, load_documents, token_windows
from statebridge.bridge.pair import ModelPair, tokenizer_digest
from statebridge.errors import ConfigError, FitError
from statebridge.translate import BilinearRidge, BlockRidge, KeyValueRidge, Translator


def silent(stage: str, done: int, total: int) -> None:
    """Progress that shows nothing."""


def fit_bridge(
    pair: ModelPair,
    documents: Iterable[Document] | None = None,
    config: FitConfig | None = None,
    *,
    work_dir: str | Path | None = None,
    progress: Progress = silent,
) -> Bridge:
    """Fit translators of K, V, R and C on documents that both models read.

    Parameters
    ----------
    pair
        Source, receiver and tokenizer.
    documents
        Documents in order; those of `config.documents` when left out.
    config
        Settings; the published protocol when left out.
    work_dir
        Folder for R matrices and unfinished moments; an interrupted fit resumes there. A temporary folder
        when left out.
    progress
        Called with (stage, done, total).

    Returns
    -------
    Bridge
        All maps, under the plan of the config. Under `accelerate launch`, every process returns the same.

    Raises
    ------
    DocumentError
        When there are too few documents that are long enough.
    FitError
        When the models do not correspond, or states hold NaN.
    ConfigError
        When the settings contradict themselves or `work_dir` holds another run.
    """
    from accelerate import PartialState

    config = config or FitConfig()
    if not config.checkpoints or min(config.checkpoints) < 1 or config.batch_size < 1:
        raise ConfigError("checkpoints and batch_size must be positive.")
    if config.fit_documents < 2 or config.validation_documents < 2:
        raise ConfigError("fit_documents and validation_documents must be at least 2.")
    process = PartialState()
    if work_dir is None and process.num_processes > 1:
        raise ConfigError("Several processes need a work_dir that all of them see.")
    windows = token_windows(
        load_documents(config.documents) if documents is None else documents,
        pair.tokenizer,
        max(config.checkpoints),
        config.validation_documents + config.fit_documents,
        config.documents.window,
        config.seed,
    )
    splits: dict[Split, Any] = {
        "validation": windows[: config.validation_documents],
        "fit": windows[config.validation_documents :],
    }
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        states = collect(
            pair,
            splits,
            config.checkpoints,
            config.batch_size,
            Path(work_dir or scratch),
            _fingerprint(pair, config, [w.id for w in windows]),
            progress,
            process.process_index,
            process.num_processes,
        )
        process.wait_for_everyone()
        states.merge_others(process.num_processes)
        collected = time.monotonic() - started
        translators, errors = _fit_maps(states, config, progress)
    report = {
        "settings": dataclasses.asdict(config),
        "documents": {split: [w.id for w in found] for split, found in splits.items()},
        "errors": errors,
        "share_of_time_in_forward_passes": round(collected / (time.monotonic() - started), 3),
    }
    return Bridge(
        BridgeConfig(
            source=pair.source_identity,
            receiver=pair.receiver_identity,
            plan=config.plan,
            tokenizer=tokenizer_digest(pair.tokenizer),
            fit=report,
        ),
        translators,
    )


def _fit_maps(
    states: PairedStates, config: FitConfig, progress: Progress
) -> tuple[dict[tuple[int, str], Translator], dict[str, dict[str, Any]]]:
    translators: dict[tuple[int, str], Translator] = {}
    errors: dict[str, dict[str, Any]] = {}
    jobs: list[tuple[int, str]] = []
    for index in states.geometry.key_value:
        jobs += [(index, "key"), (index, "value")]
    jobs += [(index, "conv_state") for index in states.geometry.conv]
    jobs += [(index, "recurrent_state") for index in states.geometry.recurrent]
    for number, (index, name) in enumerate(jobs):
        progress("fit", number, len(jobs))
        try:
            fitted = _fit_one(states, config, index, name)
        except FitError as error:
            raise FitError(f"Layer {index}, {name}: {error}") from error
        translators[index, name] = fitted.map_
        errors[f"{index}.{name}"] = {
            "translated": _mean(fitted.validation_error_),
            "copied": None if fitted.copy_error_ is None else _mean(fitted.copy_error_),
            "alpha": sorted({float(f"{a:.6g}") for a in fitted.alpha_.flatten().tolist()}),
        }
    progress("fit", len(jobs), len(jobs))
    return translators, errors


def _fit_one(states: PairedStates, config: FitConfig, index: int, name: str) -> Any:
    if name in ("key", "value"):
        moments = getattr(states, name)
        return KeyValueRidge(config.ridge_alphas).fit(moments["fit"][index], moments["validation"][index])
    if name == "conv_state":
        return BlockRidge(config.ridge_alphas).fit(
            states.conv["fit"][index], states.conv["validation"][index]
        )
    return BilinearRidge(config.bilinear_alphas, config.bilinear_iterations).fit(
        lambda: states.blocks("fit", index), lambda: states.blocks("validation", index)
    )


def _mean(errors: torch.Tensor) -> float:
    return round(float(errors.mean()), 4)


def _fingerprint(pair: ModelPair, config: FitConfig, names: list[str]) -> dict[str, Any]:
    settings = dataclasses.asdict(config)
    settings.pop("plan")  # the plan decides nothing that is collected
    return {
        "settings": settings,
        "source": pair.source_identity.weights,
        "receiver": pair.receiver_identity.weights,
        "tokenizer": tokenizer_digest(pair.tokenizer),
        "documents": names,
    }
