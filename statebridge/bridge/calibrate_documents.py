"""What the training of a calibrator reads of each document, prepared once.

    base state     the source's state after L tokens, under the bridge's plan, a state of the receiver
    native logits  what the receiver itself says at the P output positions after it has read the prefix

Native logits are kept in the folder. Base states are kept there too, or in the memory of the training device, or
nowhere, and then the source reads again whenever they are needed. A file that is there is whole, so an interrupted
preparation goes on; several processes share the files. Knows models and files, no losses.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from statebridge.bridge.bridge import Bridge
from statebridge.bridge.collect import Progress
from statebridge.bridge.config import CalibrateConfig
from statebridge.bridge.documents import TokenWindow
from statebridge.bridge.pair import ModelPair, tokenizer_digest
from statebridge.bridge.paired import SPLITS, Split
from statebridge.capture import continue_from, prefill
from statebridge.errors import DocumentError, FitError
from statebridge.state import HybridState
from statebridge.state.file import atomic_file


@dataclass(frozen=True)
class Batch:
    """Some documents: base state of B rows, next tokens [B, P], native logits [B, P, vocab]."""

    base: HybridState
    next_ids: torch.Tensor
    native: torch.Tensor


class CalibrationDocuments:
    """Documents of both splits, prepared in a folder.

    Parameters
    ----------
    pair, bridge
        The models and the bridge whose plan gives the base states; a calibrator of it is left out.
    windows
        Documents of each split, at least L + P tokens each.
    config
        Lengths, micro-batch and where states are kept.
    folder
        Where the files lie.

    Attributes
    ----------
    device
        Where the training runs: that of the receiver's embeddings.

    Notes
    -----
    States on the device are gone with the process. What a process does not hold, after a resume or because
    another process prepared the document, the source reads when it is asked for, in the micro-batches of the
    preparation, so that the bits are those of an uninterrupted run. That costs one prefill of each document; from
    then on it is held.

    Raises
    ------
    DocumentError
        When a split is empty, a document is too short, or one is in both splits.
    """

    def __init__(
        self,
        pair: ModelPair,
        bridge: Bridge,
        windows: Mapping[Split, Sequence[TokenWindow]],
        config: CalibrateConfig,
        folder: Path,
    ) -> None:
        self.pair, self.config, self.folder = pair, config, folder
        self.plan = bridge.with_plan(bridge.plan)
        self.windows = {split: list(windows.get(split, ())) for split in SPLITS}
        self.tokenizer = tokenizer_digest(pair.tokenizer)
        self.device: torch.device = pair.receiver.get_input_embeddings().weight.device
        self._held: dict[tuple[Split, int], HybridState] = {}  # of one row each
        _check(self.windows, config.prefix + config.positions)

    def prepare(self, progress: Progress, rank: int = 0, processes: int = 1) -> None:
        """Let the models read what has not been read yet; this process's share of it.

        Raises
        ------
        FitError
            When a state or a logit is not finite, or the disk or the device has no room for the states.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        share = list(self._chunks())[rank::processes]
        for done, (split, numbers) in enumerate(share):
            progress("read documents", done, len(share))
            if not all(path.exists() for n in numbers for path in self._files(split, n)):
                self._read(split, numbers)
        progress("read documents", len(share), len(share))

    def batch(self, split: Split, numbers: Sequence[int]) -> Batch:
        """Some documents by number, on the device; to be read and not written to, because kept states are shared.

        Raises
        ------
        FitError
            When the device has no room for the states that it should keep.
        """
        native = [load_file(self._path(split, n, "native"))["logits"] for n in numbers]
        if self.config.states == "recompute":
            base = self._base(split, numbers).to(self.device)
        else:
            kept = [self._kept(split, n) for n in numbers]
            base = kept[0] if len(kept) == 1 else HybridState.merge(kept)  # merging one would copy it
        next_ids = self._ids(split, numbers)[:, self.config.prefix :]
        return Batch(base, next_ids, torch.stack(native).to(self.device))

    def chunks(self, split: Split, numbers: Sequence[int] | None = None) -> Iterator[list[int]]:
        """Cut the given documents of a split, or all of them, into micro-batches."""
        chosen = list(range(len(self.windows[split])) if numbers is None else numbers)
        for start in range(0, len(chosen), self.config.micro_batch):
            yield chosen[start : start + self.config.micro_batch]

    def _chunks(self) -> Iterator[tuple[Split, list[int]]]:
        for split in SPLITS:
            yield from ((split, numbers) for numbers in self.chunks(split))

    def _read(self, split: Split, numbers: list[int]) -> None:
        ids = self._ids(split, numbers)
        prefix, next_ids = ids[:, : self.config.prefix], ids[:, self.config.prefix :]
        with torch.inference_mode():
            live = prefill(self.pair.receiver, prefix)
            native = continue_from(self.pair.receiver, live, next_ids).logits  # [B, P, vocab]
        self._require_finite(split, numbers, {"native logits": native})
        base = self._base(split, numbers)
        self._require_finite(
            split,
            numbers,
            {f"layer {i} {name}": x for i, layer in enumerate(base.layers) for name, x in layer.tensors()},
        )
        if self.config.states == "disk":
            self._require_room(base)
            for row, n in enumerate(numbers):
                base.select([row]).save(self._path(split, n, "state"))
        elif self.config.states == "device":
            self._hold(split, numbers, base)
        for row, n in enumerate(numbers):
            with atomic_file(self._path(split, n, "native")) as temporary:
                save_file({"logits": native[row].cpu().contiguous()}, temporary)

    def _base(self, split: Split, numbers: Sequence[int]) -> HybridState:
        with torch.inference_mode():
            prefix = self._ids(split, numbers)[:, : self.config.prefix]
            return self.plan(prefill(self.pair.source, prefix, tokenizer=self.tokenizer).state())

    def _kept(self, split: Split, number: int) -> HybridState:
        """The state of one document from where it is kept."""
        if self.config.states == "disk":
            return HybridState.load(self._path(split, number, "state"), self.device)
        if (split, number) not in self._held:
            numbers = list(self.chunks(split))[number // self.config.micro_batch]
            self._hold(split, numbers, self._base(split, numbers))
        return self._held[split, number]

    def _hold(self, split: Split, numbers: Sequence[int], base: HybridState) -> None:
        if not self._held:
            self._require_memory(base)
        for row, n in enumerate(numbers):
            self._held[split, n] = base.select([row]).to(self.device)

    def _ids(self, split: Split, numbers: Sequence[int]) -> torch.Tensor:
        length = self.config.prefix + self.config.positions
        return torch.stack([self.windows[split][n].ids[:length] for n in numbers])  # [B, L + P]

    def _path(self, split: Split, number: int, kind: str) -> Path:
        return self.folder / f"{split}.{number}.{kind}.safetensors"

    def _files(self, split: Split, number: int) -> list[Path]:
        kinds = ("native", "state") if self.config.states == "disk" else ("native",)
        return [self._path(split, number, kind) for kind in kinds]

    def _require_finite(self, split: Split, numbers: list[int], found: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in found.items():
            bad = ~tensor.isfinite().flatten(1).all(1)
            if bool(bad.any()):
                document = self.windows[split][numbers[int(bad.int().argmax())]].id
                raise FitError(
                    f"{name} of the document {document} holds NaN or infinity; leave the document out."
                )

    def _require_room(self, base: HybridState) -> None:
        each = sum(base.nbytes().values()) // base.batch_size
        missing = sum(
            not self._path(split, n, "state").exists() for split, numbers in self._chunks() for n in numbers
        )
        free = shutil.disk_usage(self.folder).free
        if each * missing > free:
            raise FitError(
                f"{missing} states of {each / 1e6:,.0f} MB each do not fit into {self.folder}, which has "
                f'{free / 1e9:,.1f} GB free; choose another work_dir, or set states to "recompute".'
            )

    def _require_memory(self, base: HybridState) -> None:
        each = sum(base.nbytes().values()) // base.batch_size
        count = sum(len(windows) for windows in self.windows.values())
        free = _free_bytes(self.device)
        if each * count > free:
            raise FitError(
                f"{count} states of {each / 1e6:,.0f} MB each, {each * count / 1e9:,.1f} GB, do not fit into the "
                f"memory of {self.device}, which has {free / 1e9:,.1f} GB free; set states to "
                '"disk" or "recompute".'
            )


def _free_bytes(device: torch.device) -> float:
    """What a GPU can still give, with what torch holds of it and does not use; no limit is known elsewhere."""
    if device.type != "cuda":
        return float("inf")
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def _check(windows: Mapping[Split, Sequence[TokenWindow]], length: int) -> None:
    for split in SPLITS:
        if not windows[split]:
            raise DocumentError(f"Calibration has no {split} documents; give at least one.")
        for window in windows[split]:
            if len(window.ids) < length:
                raise DocumentError(
                    f"The document {window.id} has {len(window.ids)} tokens, calibration needs {length}; leave it "
                    "out, or shorten the prefix."
                )
    both = {w.id for w in windows["fit"]} & {w.id for w in windows["validation"]}
    if both:
        raise DocumentError(
            f"The document {min(both)} is in both splits, so validation would see training; use it in one."
        )
