"""What the training of a calibrator reads of each document, prepared once.

    base state     the source's state after L tokens, under the bridge's plan, a state of the receiver
    native logits  what the receiver itself says at the P output positions after it has read the prefix

Both models read a document once. Native logits are kept in the folder; base states too, or the source reads
again whenever they are needed. A file that is there is whole, so an interrupted preparation goes on; several
processes share the documents. Knows models and files, no losses.
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
        Lengths, micro-batch and whether states are kept.
    folder
        Where the files lie.

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
        _check(self.windows, config.prefix + config.positions)

    def prepare(self, progress: Progress, rank: int = 0, processes: int = 1) -> None:
        """Let the models read what has not been read yet; this process's share of it.

        Raises
        ------
        FitError
            When a state or a logit is not finite, or the disk has no room for the states.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        share = list(self._chunks())[rank::processes]
        for done, (split, numbers) in enumerate(share):
            progress("read documents", done, len(share))
            if not all(path.exists() for n in numbers for path in self._files(split, n)):
                self._read(split, numbers)
        progress("read documents", len(share), len(share))

    def batch(self, split: Split, numbers: Sequence[int], device: torch.device) -> Batch:
        """Some documents by number, on `device`."""
        native = [load_file(self._path(split, n, "native"))["logits"] for n in numbers]
        if self.config.states == "disk":
            base = HybridState.merge(
                [HybridState.load(self._path(split, n, "state"), device) for n in numbers]
            )
        else:
            base = self._base(split, numbers).to(device)
        return Batch(base, self._ids(split, numbers)[:, self.config.prefix :], torch.stack(native).to(device))

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
        for row, n in enumerate(numbers):
            with atomic_file(self._path(split, n, "native")) as temporary:
                save_file({"logits": native[row].cpu().contiguous()}, temporary)

    def _base(self, split: Split, numbers: Sequence[int]) -> HybridState:
        with torch.inference_mode():
            prefix = self._ids(split, numbers)[:, : self.config.prefix]
            return self.plan(prefill(self.pair.source, prefix, tokenizer=self.tokenizer).state())

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
