"""Fit a bridge: collect paired states of documents, fit every map, freeze them under a plan.

All maps are fitted whatever the plan says, so that any plan can be tried later without another pass over the
documents.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from statebridge.bridge.artefact import BridgeConfig
from statebridge.bridge.bridge import Bridge
from statebridge.bridge.collect import Progress, collect, fitting_device, state_counts
from statebridge.bridge.config import FitConfig
from statebridge.bridge.documents import Document, TokenWindow, load_documents, token_windows
from statebridge.bridge.geometry import Geometry
from statebridge.bridge.pair import ModelPair, tokenizer_digest
from statebridge.bridge.paired import PairedStates, Split
from statebridge.errors import ConfigError, FitError
from statebridge.select import Plan
from statebridge.translate import BilinearRidge, BlockRidge, KeyValueRidge, Translator


def silent(stage: str, done: int, total: int) -> None:
    """Progress that shows nothing."""


def fit_bridge(
    pair: ModelPair,
    documents: Iterable[Document | TokenWindow] | None = None,
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
        Called with (stage, done, total): "collect" in documents, then "fit" in maps; under several processes,
        of this one's share.

    Returns
    -------
    Bridge
        All maps, under the plan of the config. Under `accelerate launch`, every process returns the same.

    Raises
    ------
    DocumentError
        When there are too few documents that are long enough.
    FitError
        When the models do not correspond, states hold NaN, or the disk has no room for the R matrices.
    ConfigError
        When `work_dir` holds another run, or several processes have none, or the plan lists other layers.
    """
    from accelerate import PartialState

    config = config or FitConfig()
    # accelerate takes CPU processes for so many single ones unless it is told
    process = PartialState(cpu=pair.source.device.type == "cpu")
    if work_dir is None and process.num_processes > 1:
        raise ConfigError("Several processes need a work_dir that all of them see.")
    Plan.parse(config.plan).require_layers(len(pair.source_identity.layers))
    windows = token_windows(
        load_documents(config.documents) if documents is None else documents,
        pair.tokenizer,
        max(config.checkpoints),
        config.validation_documents + config.fit_documents,
        config.documents.window,
        config.seed,
    )
    splits: dict[Split, list[TokenWindow]] = {
        "validation": windows[: config.validation_documents],
        "fit": windows[config.validation_documents :],
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(work_dir or scratch)
        collect(pair, splits, config, folder, progress, process.process_index, process.num_processes)
        process.wait_for_everyone()
        states = PairedStates.merged(
            folder,
            Geometry.of(pair),
            state_counts(splits, config),
            process.num_processes,
            fitting_device(pair),
        )
        translators, errors = _fit_maps(states, config, progress, process)
    settings = dataclasses.asdict(config)
    # a bridge is published, the paths of this machine are not
    if (local := Path(config.documents.source)).exists():
        settings["documents"]["source"] = local.name
    report: dict[str, Any] = {
        "settings": settings,
        "documents": {split: [w.id for w in found] for split, found in splits.items()},
        "errors": errors,
    }
    return Bridge(
        BridgeConfig(
            source=pair.source_identity,
            receiver=pair.receiver_identity,
            plan=config.plan,
            tokenizer=tokenizer_digest(pair.tokenizer),
            fit=json.loads(json.dumps(report)),  # what a saved bridge gives back
        ),
        translators,
    )


def _fit_maps(
    states: PairedStates, config: FitConfig, progress: Progress, process: Any
) -> tuple[dict[tuple[int, str], Translator], dict[str, dict[str, Any]]]:
    """Fit every map, shared out among the processes; each gets all of them back."""
    from accelerate.utils import gather_object

    jobs: list[tuple[int, str]] = []
    for index in states.geometry.key_value:
        jobs += [(index, "key"), (index, "value")]
    jobs += [(index, "conv_state") for index in states.geometry.conv]
    jobs += [(index, "recurrent_state") for index in states.geometry.recurrent]
    share = jobs[process.process_index :: process.num_processes]
    fits: list[tuple[tuple[int, str], Translator, dict[str, Any]]] = []
    for number, (index, name) in enumerate(share):
        progress("fit", number, len(share))
        try:
            fitted = _fit_one(states, config, index, name)
        except FitError as error:
            raise FitError(f"Layer {index}, {name}: {error}") from error
        found = {
            "translated": _mean(fitted.validation_error_),
            "copied": None if fitted.copy_error_ is None else _mean(fitted.copy_error_),
            "alpha": sorted({float(f"{a:.6g}") for a in fitted.alpha_.flatten().tolist()}),
        }
        fits.append(((index, name), fitted.map_.to("cpu"), found))
    progress("fit", len(share), len(share))
    ordered = sorted(gather_object(fits), key=lambda fit: jobs.index(fit[0]))
    return (
        {key: translator for key, translator, _ in ordered},
        {f"{index}.{name}": found for (index, name), _, found in ordered},
    )


def _fit_one(states: PairedStates, config: FitConfig, index: int, name: str) -> Any:
    if name in ("key", "value"):
        moments = getattr(states, name)
        return KeyValueRidge(config.ridge_alphas).fit(moments["fit"][index], moments["validation"][index])
    if name == "conv_state":
        return BlockRidge(config.ridge_alphas).fit(
            states.conv["fit"][index], states.conv["validation"][index]
        )
    return BilinearRidge(config.bilinear_alphas, config.bilinear_iterations).fit(
        states.passes("fit", index), states.passes("validation", index)
    )


def _mean(errors: torch.Tensor) -> float:
    return round(float(errors.mean()), 4)
