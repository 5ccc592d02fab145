"""Let both models of a pair read documents, and collect their states for the fits.

Every document is read by both models at each checkpoint length, each length by its own one-shot prefill,
because chunked and one-shot prefill do not give identical states. K and V come from the longest; R and C from
all. An interrupted collection resumes where its last save was; several processes share the documents, batch
by batch, and their moments are merged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from statebridge.bridge.config import FitConfig
from statebridge.bridge.documents import TokenWindow
from statebridge.bridge.geometry import Geometry
from statebridge.bridge.pair import ModelPair, tokenizer_digest
from statebridge.bridge.paired import SPLITS, PairedStates, Split
from statebridge.capture import prefill
from statebridge.errors import ConfigError, FitError
from statebridge.state import HybridState, ModelIdentity
from statebridge.state.file import atomic_file

Progress = Callable[[str, int, int], None]
_SAVE_EVERY_SECONDS = 60.0


def collect(
    pair: ModelPair,
    windows: dict[Split, list[TokenWindow]],
    config: FitConfig,
    folder: Path,
    progress: Progress,
    rank: int = 0,
    processes: int = 1,
) -> None:
    """Run both models over all windows and save what the fits need in `folder`.

    Parameters
    ----------
    pair
        The models.
    windows
        Documents of each split, all of `max(config.checkpoints)` tokens.
    config
        Checkpoints and batch size.
    folder
        Working folder; a run that was interrupted there goes on. `PairedStates.merged` reads it.
    progress
        Called with ("collect", documents done, documents of this process).
    rank, processes
        This process and how many share the documents.

    Raises
    ------
    ConfigError
        When the folder holds a run of other settings, models or documents, or one that is going on.
    FitError
        When the models do not correspond, the disk is too small, or a state holds NaN.
    """
    geometry = Geometry.of(pair)
    claim_folder(folder, _fingerprint(pair, windows, config, processes), rank)
    states = PairedStates(folder, geometry, state_counts(windows, config), fitting_device(pair))
    with sole_run(folder, rank):
        states.reserve()
        states.resume(rank)
        _read(pair, windows, config, states, progress, rank, processes)


def _read(
    pair: ModelPair,
    windows: dict[Split, list[TokenWindow]],
    config: FitConfig,
    states: PairedStates,
    progress: Progress,
    rank: int,
    processes: int,
) -> None:
    checkpoints = sorted(config.checkpoints)
    jobs = [
        (split, start, windows[split][start : start + config.batch_size])
        for split in SPLITS
        for start in range(0, len(windows[split]), config.batch_size)
    ][rank::processes]
    total, done = (sum(len(batch) for _, _, batch in part) for part in (jobs, jobs[: states.done]))
    progress("collect", done, total)
    saved = time.monotonic()
    for split, start, batch in jobs[states.done :]:
        ids = torch.stack([window.ids for window in batch])
        for number, (source, receiver) in enumerate(_paired(pair, ids, checkpoints)):
            length = checkpoints[number]
            rows = slice(
                start * len(checkpoints) + number, (start + len(batch)) * len(checkpoints), len(checkpoints)
            )
            try:
                states.add(split, rows, source, receiver, keys=length == checkpoints[-1])
            except FitError as error:
                names = ", ".join(window.id for window in batch)
                raise FitError(f"{error} Found after {length} tokens of the documents {names}.") from error
        states.done += 1
        done += len(batch)
        if time.monotonic() - saved > _SAVE_EVERY_SECONDS:
            states.save(rank)
            saved = time.monotonic()
        progress("collect", done, total)
    states.save(rank)


def _paired(
    pair: ModelPair, ids: torch.Tensor, lengths: Sequence[int]
) -> Iterator[tuple[HybridState, HybridState]]:
    """States of both models after each length of `ids` [B, T], each by its own prefill."""
    # a pair that takes turns changes once for all lengths and holds the states of all of them; others hold one
    for group in [lengths] if pair.takes_turns else [[length] for length in lengths]:
        with torch.inference_mode():
            source = [prefill(pair.source, ids[:, :length]).state() for length in group]
            receiver = [prefill(pair.receiver, ids[:, :length]).state() for length in group]
        yield from zip(source, receiver, strict=True)


def fitting_device(pair: ModelPair) -> torch.device:
    """Where fits compute: in float64, which not every accelerator has."""
    device: torch.device = pair.source.device
    return device if device.type == "cuda" else torch.device("cpu")


def state_counts(windows: dict[Split, list[TokenWindow]], config: FitConfig) -> dict[Split, int]:
    """States of each split: documents times checkpoints."""
    return {split: len(windows[split]) * len(config.checkpoints) for split in SPLITS}


def _fingerprint(
    pair: ModelPair, windows: dict[Split, list[TokenWindow]], config: FitConfig, processes: int
) -> dict[str, Any]:
    """Everything that decides what lies in the folder; grids and plans are applied to it later."""
    sha = hashlib.sha256()
    for split in SPLITS:
        for window in windows[split]:
            sha.update(f"{split} {window.id} ".encode() + window.ids.numpy().tobytes())
    return {
        "source": model_fingerprint(pair.source, pair.source_identity),
        "receiver": model_fingerprint(pair.receiver, pair.receiver_identity),
        "tokenizer": tokenizer_digest(pair.tokenizer),
        "documents": sha.hexdigest(),
        "checkpoints": sorted(config.checkpoints),
        "batch_size": config.batch_size,
        "number of processes": processes,
    }


def model_fingerprint(model: Any, identity: ModelIdentity) -> str:
    """What of a model must be unchanged when a run goes on: identity, dtype, but not where it came from."""
    bare = dataclasses.replace(identity, name="", revision="")
    return f"{identity.model_type} {model.dtype} {hashlib.sha256(repr(bare).encode()).hexdigest()}"


@contextlib.contextmanager
def sole_run(folder: Path, rank: int) -> Iterator[None]:
    """Hold the lock of process `rank`: a second run there would write over what the first one keeps."""
    with (folder / f"process.{rank}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"Another process works in {folder}; wait for it or choose another folder."
            ) from error
        yield


def claim_folder(folder: Path, wanted: dict[str, Any], rank: int) -> None:
    """Make a work folder this run's own, or refuse it with `ConfigError` when it holds another run's."""
    path = folder / "run.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        found = None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} cannot be used as work_dir ({error}); choose another folder.") from error
    if found is None:
        if rank == 0:
            with atomic_file(path) as temporary:
                temporary.write_text(json.dumps(wanted, indent=1), encoding="utf-8")
        return
    changed = sorted(key for key in wanted if not isinstance(found, dict) or wanted[key] != found.get(key))
    if changed:
        raise ConfigError(
            f"{folder} holds a run with another {', '.join(changed)}; choose another work_dir or delete it."
        )
