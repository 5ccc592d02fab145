"""Collect paired states of both models: moments for K, V and C, memory-mapped matrices for R.

Every document is read by both models at each checkpoint length, each length by its own one-shot prefill,
because chunked and one-shot prefill do not give identical states. K and V come from the longest; R and C from
all. Nothing grows with the number of documents except R, whose size is announced and which lies on disk.
An interrupted collection resumes where its last save was; several processes share the documents and their
moments are merged.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from statebridge.bridge.documents import TokenWindow
from statebridge.bridge.pair import ModelPair
from statebridge.capture import prefill, profile
from statebridge.capture.model import text_config
from statebridge.errors import ConfigError, FitError
from statebridge.state import HybridState, unrotate
from statebridge.state.file import atomic_file
from statebridge.translate import BlockLayout, BlockMoments, Moments, head_moments, head_rows

Split = Literal["fit", "validation"]
SPLITS: tuple[Split, ...] = ("validation", "fit")
Progress = Callable[[str, int, int], None]
_SAVE_EVERY_SECONDS = 60.0
_BLOCK_STATES = 64  # recurrent states per block of the bilinear fit


@dataclass(frozen=True)
class Geometry:
    """Which layers of the pair have which maps, with their sizes."""

    key_value: dict[int, tuple[int, int, int, int, int]]  # layer -> H, Dk_s, Dk_r, Dv_s, Dv_r
    recurrent: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]  # layer -> shapes [H, K, V] of both
    conv: dict[int, BlockLayout]

    @classmethod
    def of(cls, pair: ModelPair) -> Geometry:
        """Geometry of a pair of (gated) delta-rule hybrids with one-to-one layers.

        Raises
        ------
        FitError
            When the models' layers or heads do not correspond.
        """
        source, receiver = pair.source_identity.layers, pair.receiver_identity.layers
        kinds = [(a.kind, b.kind) for a, b in zip(source, receiver, strict=False)]
        if len(source) != len(receiver) or any(a != b for a, b in kinds):
            raise FitError(
                f"The models have {len(source)} and {len(receiver)} layers or other kinds of layers in another "
                "order; translators need layers that correspond one to one."
            )
        rules = [profile(model).rule for model in (pair.source, pair.receiver)]
        if any(not rule.gated_delta for rule in rules) and any(kind[0] != "attention" for kind in kinds):
            raise FitError(
                "Only Gated DeltaNet hybrids and attention models can be fitted; R and C of other "
                "families can be captured and restored, not translated."
            )
        key_value, recurrent, conv = {}, {}, {}
        for index, (a, b) in enumerate(zip(source, receiver, strict=True)):
            if a.key:
                if a.key[0] != b.key[0]:
                    raise FitError(
                        f"Layer {index} has {a.key[0]} and {b.key[0]} KV heads; equal counts are needed."
                    )
                key_value[index] = (a.key[0], a.key[1], b.key[1], a.value[1], b.value[1])
            if a.recurrent_state:
                recurrent[index] = (a.recurrent_state, b.recurrent_state)
            if a.conv_state:
                layouts = [_head_blocks(text_config(model)) for model in (pair.source, pair.receiver)]
                if layouts[0] != layouts[1]:
                    raise FitError(
                        f"Layer {index} has other convolution channels in the two models; equal head "
                        "counts and dims are needed."
                    )
                conv[index] = layouts[0]
        return cls(key_value, recurrent, conv)

    def recurrent_bytes(self, states: int) -> int:
        """Bytes on disk for the R matrices of `states` states of both models."""
        return sum(4 * states * (int(np.prod(a)) + int(np.prod(b))) for a, b in self.recurrent.values())


def _head_blocks(config: Any) -> BlockLayout:
    key = (config.linear_num_key_heads, config.linear_key_head_dim)
    return BlockLayout.of_heads(key, key, (config.linear_num_value_heads, config.linear_value_head_dim))


class PairedStates:
    """Everything that the fits need, collected in a folder.

    Parameters
    ----------
    folder
        Where R matrices and unfinished moments lie.
    geometry
        Layers and sizes of the pair.
    counts
        States (documents × checkpoints) of each split.
    rank
        Number of this process; each keeps its own moments.
    """

    def __init__(self, folder: Path, geometry: Geometry, counts: dict[Split, int], rank: int = 0) -> None:
        self.folder, self.geometry, self.counts, self.rank = folder, geometry, counts, rank
        self.key: dict[Split, dict[int, Moments]] = {s: {} for s in SPLITS}
        self.value: dict[Split, dict[int, Moments]] = {s: {} for s in SPLITS}
        self.conv: dict[Split, dict[int, BlockMoments]] = {s: {} for s in SPLITS}
        for split in SPLITS:
            for index, (heads, ks, kr, vs, vr) in geometry.key_value.items():
                self.key[split][index] = head_moments(heads, ks, kr)
                self.value[split][index] = head_moments(heads, vs, vr)
            for index, layout in geometry.conv.items():
                self.conv[split][index] = BlockMoments(layout)
        self.done = 0

    def add(
        self,
        split: Split,
        first_row: int,
        stride: int,
        source: HybridState,
        receiver: HybridState,
        keys: bool,
    ) -> None:
        """Fold in states of the same documents; row b goes to R row `first_row + b * stride`."""
        if keys:
            bare = [_unrotated_keys(state) for state in (source, receiver)]
            for index in self.geometry.key_value:
                self.key[split][index].update(*(head_rows(keys[index]).cpu() for keys in bare))
                values = (source.layers[index].value, receiver.layers[index].value)
                self.value[split][index].update(*(head_rows(v).cpu() for v in values if v is not None))
        for index, moments in self.conv[split].items():
            pair = (source.layers[index].conv_state, receiver.layers[index].conv_state)
            moments.update(*(c.cpu() for c in pair if c is not None))
        for index in self.geometry.recurrent:
            rows = slice(first_row, first_row + source.batch_size * stride, stride)
            for side, state in (("source", source), ("receiver", receiver)):
                matrix = state.layers[index].recurrent_state
                if matrix is not None:
                    self._matrix(split, index, side, "r+")[rows] = matrix.float().cpu().numpy()

    def create_matrices(self) -> None:
        """Create the R files at their full size, which is known beforehand."""
        (self.folder / "recurrent").mkdir(parents=True, exist_ok=True)
        for split in SPLITS:
            for index in self.geometry.recurrent:
                for side in ("source", "receiver"):
                    if not self._path(split, index, side).exists():
                        self._matrix(split, index, side, "w+").flush()

    def blocks(self, split: Split, index: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """R of one layer in blocks of states, ([n, H, K, V] of the source, the same of the receiver)."""
        pair = [self._matrix(split, index, side, "r") for side in ("source", "receiver")]
        for start in range(0, self.counts[split], _BLOCK_STATES):
            yield tuple(  # type: ignore[misc]
                torch.from_numpy(np.array(matrix[start : start + _BLOCK_STATES])) for matrix in pair
            )

    def save(self) -> None:
        """Persist this process's moments; R rows are in their files already."""
        tensors = {"done": torch.tensor(self.done)}
        for name, moments in self._named():
            tensors |= {f"{name}/{k}": t.contiguous() for k, t in moments.state_dict().items()}
        with atomic_file(self._moments_file(self.rank)) as temporary:
            save_file(tensors, temporary)

    def resume(self) -> None:
        """Go on from this process's last save, if there is one."""
        path = self._moments_file(self.rank)
        if path.exists():
            self._load(path)

    def merge_others(self, processes: int) -> None:
        """Fold in the saved moments of every other process."""
        for rank in range(processes):
            if rank != self.rank:
                other = PairedStates(self.folder, self.geometry, self.counts, rank)
                other._load(other._moments_file(rank))
                for (_, mine), (_, theirs) in zip(self._named(), other._named(), strict=True):
                    mine.merge(theirs)  # type: ignore[arg-type]

    def _named(self) -> Iterator[tuple[str, Moments | BlockMoments]]:
        for split in SPLITS:
            for name in ("key", "value", "conv"):
                for index, moments in getattr(self, name)[split].items():
                    yield f"{split}/{name}/{index}", moments

    def _load(self, path: Path) -> None:
        tensors = load_file(path)
        self.done = int(tensors["done"])
        for name, moments in list(self._named()):
            split, kind, index = name.split("/")
            part = {k.removeprefix(f"{name}/"): t for k, t in tensors.items() if k.startswith(f"{name}/")}
            if isinstance(moments, BlockMoments):
                loaded: Any = BlockMoments.from_state_dict(part, moments.layout)
            else:
                loaded = Moments.from_state_dict(part, moments.names)
            getattr(self, kind)[split][int(index)] = loaded

    def _moments_file(self, rank: int) -> Path:
        return self.folder / f"moments.{rank}.safetensors"

    def _path(self, split: Split, index: int, side: str) -> Path:
        return self.folder / "recurrent" / f"{split}.{index}.{side}.f32"

    def _matrix(self, split: Split, index: int, side: str, mode: Any) -> np.memmap[Any, Any]:
        shape = self.geometry.recurrent[index][side == "receiver"]
        return np.memmap(self._path(split, index, side), np.float32, mode, shape=(self.counts[split], *shape))


def collect(
    pair: ModelPair,
    windows: dict[Split, list[TokenWindow]],
    checkpoints: tuple[int, ...],
    batch_size: int,
    folder: Path,
    fingerprint: dict[str, Any],
    progress: Progress,
    rank: int = 0,
    processes: int = 1,
) -> PairedStates:
    """Run both models over all windows and collect their states.

    Parameters
    ----------
    pair
        The models.
    windows
        Documents of each split, all of `max(checkpoints)` tokens.
    checkpoints, batch_size
        Prefix lengths, and documents per forward pass.
    folder
        Working folder; a run that was interrupted there goes on.
    fingerprint
        Settings and identities; a folder with others is refused.
    progress
        Called with (stage, done, total).
    rank, processes
        This process and how many share the documents.

    Raises
    ------
    ConfigError
        When the folder holds an unfinished run of other settings.
    """
    _claim(folder, fingerprint, rank)
    counts = {split: len(windows[split]) * len(checkpoints) for split in SPLITS}
    states = PairedStates(folder, Geometry.of(pair), counts, rank)
    states.create_matrices()
    states.resume()
    jobs = [
        (split, start, windows[split][start : start + batch_size])
        for split in SPLITS
        for start in range(0, len(windows[split]), batch_size)
    ][rank::processes]
    total = sum(len(batch) for _, _, batch in jobs)
    progress("collect", sum(len(batch) for _, _, batch in jobs[: states.done]), total)
    saved = time.monotonic()
    with torch.inference_mode():
        for split, start, batch in jobs[states.done :]:
            ids = torch.stack([window.ids for window in batch])
            for number, length in enumerate(sorted(checkpoints)):
                source, receiver = (
                    prefill(model, ids[:, :length]).state() for model in (pair.source, pair.receiver)
                )
                states.add(
                    split,
                    start * len(checkpoints) + number,
                    len(checkpoints),
                    source,
                    receiver,
                    keys=length == max(checkpoints),
                )
            states.done += 1
            if time.monotonic() - saved > _SAVE_EVERY_SECONDS:
                states.save()
                saved = time.monotonic()
            progress("collect", sum(len(b) for _, _, b in jobs[: states.done]), total)
    states.save()
    return states


def _unrotated_keys(state: HybridState) -> dict[int, torch.Tensor]:
    rope, positions = state.bookkeeping.model.rope, state.bookkeeping.positions
    keys = {i: layer.key for i, layer in enumerate(state.layers) if layer.key is not None}
    if rope is None or positions is None:
        return keys
    return {index: unrotate(key, positions, rope) for index, key in keys.items()}


def _claim(folder: Path, fingerprint: dict[str, Any], rank: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.json"
    wanted = json.loads(json.dumps(fingerprint))
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
        if changed:
            raise ConfigError(
                f"{folder} holds a run with another {', '.join(changed)}; choose another folder or delete it."
            )
    elif rank == 0:
        with atomic_file(path) as temporary:
            temporary.write_text(json.dumps(wanted, indent=1), encoding="utf-8")
