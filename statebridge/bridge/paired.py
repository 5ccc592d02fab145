"""Paired states of both models, gathered for the fits: moments of K, V and C, matrices of R on disk.

The moments are as large after a million documents as after one. R cannot be fitted from moments (they would
be (K V)² per head), so its matrices lie in one file per layer and model, memory-mapped; their size is known
and reserved before anything runs. Each process keeps moments of its own, and all of them write rows of their
own into the same R files. Knows states and files, no models.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import torch
from safetensors.torch import load_file, save_file

from statebridge.bridge.geometry import Geometry
from statebridge.errors import FitError, StateFileError
from statebridge.state import HybridState, unrotate
from statebridge.state.file import atomic_file
from statebridge.translate import BlockMoments, Blocks, Moments, head_moments, head_rows

Split = Literal["fit", "validation"]
SPLITS: tuple[Split, ...] = ("validation", "fit")
_BLOCK_STATES = 64  # recurrent states per block of the bilinear fit
_WRITERS = min(8, os.cpu_count() or 1)
_log = logging.getLogger(__name__)


class PairedStates:
    """Everything that the fits need.

    Parameters
    ----------
    folder
        Where R matrices and unfinished moments lie.
    geometry
        Layers and sizes of the pair.
    counts
        States (documents times checkpoints) of each split.
    device
        Where the moments are, and are computed in float64.

    Attributes
    ----------
    key, value, conv
        Moments by split and layer.
    done : int
        Batches that this process has folded in.
    """

    def __init__(
        self,
        folder: Path,
        geometry: Geometry,
        counts: dict[Split, int],
        device: torch.device | str = "cpu",
    ) -> None:
        self.folder, self.geometry, self.counts, self.device = folder, geometry, counts, device
        sizes = geometry.key_value.items()
        self.key = {s: {i: head_moments(h, ks, kr, device) for i, (h, ks, kr, _, _) in sizes} for s in SPLITS}
        self.value = {
            s: {i: head_moments(h, vs, vr, device) for i, (h, _, _, vs, vr) in sizes} for s in SPLITS
        }
        self.conv = {
            s: {i: BlockMoments(layout, device) for i, layout in geometry.conv.items()} for s in SPLITS
        }
        self.done = 0

    def add(self, split: Split, rows: slice, source: HybridState, receiver: HybridState, keys: bool) -> None:
        """Fold in states of the same prefixes.

        Parameters
        ----------
        split
            What the documents are for.
        rows
            Their rows in the R files, one per state.
        source, receiver
            States of both models.
        keys
            Whether to fold in K and V as well.

        Raises
        ------
        FitError
            When a state holds NaN or infinity; names the layer.
        """
        self.add_moments(split, source, receiver, keys)
        self.add_matrices(split, rows, source, receiver)

    def add_moments(self, split: Split, source: HybridState, receiver: HybridState, keys: bool) -> None:
        """Fold C, and with `keys` K and V, into the moments; see `add`."""
        pairs = list(zip(source.layers, receiver.layers, strict=True))
        if keys:
            bare = [_unrotated_keys(state) for state in (source, receiver)]
            for index in self.geometry.key_value:
                with _naming(index):
                    self.key[split][index].update(*(head_rows(keys[index]) for keys in bare))
                    self.value[split][index].update(
                        *(head_rows(_present(layer.value)) for layer in pairs[index])
                    )
        for index, moments in self.conv[split].items():
            with _naming(index):
                moments.update(*(_present(layer.conv_state).to(self.device) for layer in pairs[index]))

    def add_matrices(self, split: Split, rows: slice, source: HybridState, receiver: HybridState) -> None:
        """Write R into its rows of the files; see `add`."""
        parts = [
            (index, side, _present(state.layers[index].recurrent_state).float())
            for index in self.geometry.recurrent
            for side, state in (("source", source), ("receiver", receiver))
        ]
        # all asked before the first is waited for
        finite = [torch.isfinite(matrix).all() for _, _, matrix in parts]
        for (index, side, _), good in zip(parts, finite, strict=True):
            if not bool(good):
                raise FitError(f"Layer {index}: R of the {side} holds NaN or infinity.")

        def write(part: tuple[int, str, torch.Tensor]) -> None:
            index, side, matrix = part
            self._matrix(split, index, side, "r+")[rows] = matrix.cpu().numpy()

        # one thread writes 1 GB/s into mapped files, most of it page faults
        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(write, parts))

    def reserve(self) -> None:
        """Reserve the disk that the R matrices will take; what lies there already stays.

        Raises
        ------
        FitError
            When the disk has too little space, with both sizes.
        """
        total = sum(self.geometry.recurrent_bytes(self.counts[split]) for split in SPLITS)
        free = shutil.disk_usage(self.folder).free
        paths = {
            self._path(split, index, side): 4 * self.counts[split] * math.prod(shape)
            for split in SPLITS
            for index, shapes in self.geometry.recurrent.items()
            for side, shape in zip(("source", "receiver"), shapes, strict=True)
        }
        there = sum(path.stat().st_size for path in paths if path.exists())
        short = FitError(
            f"The recurrent matrices of {sum(self.counts.values())} states take {_size(total)}, and {self.folder} "
            f"has {_size(free + there)} for them; give another work_dir, or fewer documents or checkpoints."
        )
        if total > free + there:
            raise short
        _log.info("R matrices take %s in %s", _size(total), self.folder)
        for path, size in paths.items():
            path.parent.mkdir(exist_ok=True)
            try:
                with path.open("ab") as file:
                    # a memory-mapped write into a hole of a full disk would kill the process
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise short from error

    def passes(self, split: Split, index: int) -> Blocks:
        """R of one layer, to be gone through many times: [n, H, K, V] of the source, the same of the receiver.

        They stay in the memory of a GPU that has room for them three times over, else each pass reads the files.
        """
        device = torch.device(self.device)
        size = 4 * self.counts[split] * sum(math.prod(shape) for shape in self.geometry.recurrent[index])
        if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 3 * size:
            blocks = list(self._blocks(split, index))
            return lambda: blocks
        return lambda: self._blocks(split, index)

    def _blocks(self, split: Split, index: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        source, receiver = (self._matrix(split, index, side, "r") for side in ("source", "receiver"))
        for start in range(0, self.counts[split], _BLOCK_STATES):
            part = slice(start, start + _BLOCK_STATES)
            yield (
                torch.from_numpy(np.array(source[part])).to(self.device),
                torch.from_numpy(np.array(receiver[part])).to(self.device),
            )

    def save(self, rank: int) -> None:
        """Persist R rows and this process's moments.

        Raises
        ------
        FitError
            When the disk is full.
        """
        tensors = {"done": torch.tensor(self.done)}
        for name, moments in self._named():
            tensors |= {f"{name}/{k}": t.contiguous() for k, t in moments.state_dict().items()}
        for path in (self.folder / "recurrent").glob("*"):
            with path.open("rb") as file:
                os.fsync(file.fileno())  # moments must never say more than the matrices hold
        try:
            with atomic_file(self._moments_file(rank)) as temporary:
                save_file(tensors, temporary)
        except (safetensors.SafetensorError, StateFileError) as error:
            raise FitError(
                f"The moments cannot be saved in {self.folder} ({error}); make room there and start again, "
                "the fit goes on from its last save."
            ) from error

    def resume(self, rank: int) -> None:
        """Go on from the last save of process `rank`, if there is one.

        Raises
        ------
        FitError
            When the file is not one that `save` wrote for this pair.
        """
        path = self._moments_file(rank)
        if not path.exists():
            return
        try:
            tensors = load_file(path, device=str(self.device))
            self.done = int(tensors["done"])
            for name, moments in list(self._named()):
                kind, split, index = name.split("/")
                part = {k.removeprefix(f"{name}/"): t for k, t in tensors.items() if k.startswith(f"{name}/")}
                if isinstance(moments, BlockMoments):
                    loaded: Any = BlockMoments.from_state_dict(part, moments.layout)
                else:
                    loaded = Moments.from_state_dict(part, moments.names)
                getattr(self, kind)[split][int(index)] = loaded
        except (safetensors.SafetensorError, KeyError, StateFileError) as error:
            raise FitError(f"{path} is damaged ({error}); delete {self.folder} and start again.") from error

    @classmethod
    def merged(
        cls,
        folder: Path,
        geometry: Geometry,
        counts: dict[Split, int],
        processes: int,
        device: torch.device | str = "cpu",
    ) -> PairedStates:
        """The saved moments of all processes, folded together in the order of their ranks."""
        total = cls(folder, geometry, counts, device)
        for rank in range(processes):
            part = cls(folder, geometry, counts, device)
            part.resume(rank)
            for (_, mine), (_, theirs) in zip(total._named(), part._named(), strict=True):
                mine.merge(theirs)  # type: ignore[arg-type]
            total.done += part.done
        return total

    def _named(self) -> Iterator[tuple[str, Moments | BlockMoments]]:
        for kind in ("key", "value", "conv"):
            for split in SPLITS:
                for index, moments in getattr(self, kind)[split].items():
                    yield f"{kind}/{split}/{index}", moments

    def _moments_file(self, rank: int) -> Path:
        return self.folder / f"moments.{rank}.safetensors"

    def _path(self, split: Split, index: int, side: str) -> Path:
        return self.folder / "recurrent" / f"{split}.{index}.{side}.f32"

    def _matrix(self, split: Split, index: int, side: str, mode: Any) -> np.memmap[Any, Any]:
        shape = self.geometry.recurrent[index][side == "receiver"]
        return np.memmap(self._path(split, index, side), np.float32, mode, shape=(self.counts[split], *shape))


@contextlib.contextmanager
def _naming(index: int) -> Iterator[None]:
    """Put the layer before what an accumulator complains of."""
    try:
        yield
    except FitError as error:
        raise FitError(f"Layer {index}: {error}") from error


def _present(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a captured state is whole"
    return tensor


def _unrotated_keys(state: HybridState) -> dict[int, torch.Tensor]:
    rope, positions = state.bookkeeping.model.rope, state.bookkeeping.positions
    keys = {i: layer.key for i, layer in enumerate(state.layers) if layer.key is not None}
    if rope is None or positions is None:
        return keys
    return {index: unrotate(key, positions, rope) for index, key in keys.items()}


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"
