"""Train calibrators over a grid, and go on where an interrupted run stopped.

    loss = mean over documents of ( KL(native ‖ hand-over), mean over positions  +  weight · penalty )

Both models are frozen; gradients reach the calibrator alone, through a differentiable restore. A step takes
`batch_size` documents of a seeded endless order that depends on the step alone, so a resumed run, or one on
several processes, sees the same documents. After every evaluation the whole training (calibrator, Adam, best
so far, curves) replaces one file. Knows the loss and the search, not where documents come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from statebridge.bridge.backward import BackwardPath
from statebridge.bridge.calibrate_documents import Batch, CalibrationDocuments
from statebridge.bridge.calibrate_progress import Training, load_moments, moments
from statebridge.bridge.collect import Progress
from statebridge.bridge.config import CalibrateConfig
from statebridge.calibrate import Calibrator
from statebridge.capture import continue_from
from statebridge.errors import FitError
from statebridge.state import HybridState


class Trainer:
    """Search the grid.

    Parameters
    ----------
    receiver
        The frozen receiver.
    documents
        Prepared documents.
    config
        Settings.
    process
        accelerate's `PartialState`.
    path
        File of the training.
    backward
        Functions that the receiver's passes run on. Only these: a source that reads a document between them runs on
        what it was prepared with, so that its bits are the same.
    """

    def __init__(
        self,
        receiver: Any,
        documents: CalibrationDocuments,
        config: CalibrateConfig,
        process: Any,
        path: Path,
        backward: BackwardPath,
    ) -> None:
        self.receiver, self.documents, self.config = receiver, documents, config
        self.process, self.path, self.backward = process, path, backward
        self.device = documents.device
        self.grid = [(rank, weight) for rank in config.ranks for weight in config.penalties]

    def run(self, progress: Progress) -> tuple[Calibrator, list[dict[str, Any]]]:
        """Train every grid point; return the calibrator with the best validation KL, and one entry per point.

        Raises
        ------
        FitError
            When the loss is no longer finite.
        """
        training = Training.load(self.path)
        while training.point < len(self.grid):
            rank, weight = self.grid[training.point]
            self._train_point(training, rank, weight, progress)
            training.close_point(rank, weight)
            self._save(training)
        progress("calibrate", len(self.grid) * self.config.max_steps, len(self.grid) * self.config.max_steps)
        return Calibrator.from_tensors(training.tensors["chosen"]).to(self.device), training.finished

    def validation_kl(self, calibrator: Calibrator) -> Tensor:
        """KL of every validation document and position, float32 [N, P]; every process gets all of it."""
        count = len(self.documents.windows["validation"])
        found = torch.zeros(count, self.config.positions, device=self.device)
        for numbers in self._share(range(count)):
            batch = self.documents.batch("validation", numbers)
            with torch.no_grad():
                found[numbers] = self._divergence(calibrator, batch)
        return self._sum(found).cpu()

    def _train_point(self, training: Training, rank: int, weight: float, progress: Progress) -> None:
        layers = self.documents.pair.receiver_identity.layers
        if "now" in training.tensors:
            calibrator = Calibrator.from_tensors(training.tensors["now"])
        else:
            calibrator = Calibrator.identity(layers, rank, self.config.components, self.config.seed)
        calibrator.to(self.device)
        adam = torch.optim.Adam(calibrator.parameters(), lr=self.config.learning_rate)
        load_moments(adam, training.tensors.get("adam", {}), training.step)
        if not training.curve:
            self._evaluate(training, calibrator, adam, {})
        while training.waited < self.config.patience and training.step < self.config.max_steps:
            losses = []
            for _ in range(min(self.config.evaluate_every, self.config.max_steps - training.step)):
                total = len(self.grid) * self.config.max_steps
                progress("calibrate", training.point * self.config.max_steps + training.step, total)
                losses.append(self._step(calibrator, adam, weight, training.step))
                training.step += 1
            kl, penalty = torch.stack(losses).mean(0).tolist()
            self._evaluate(training, calibrator, adam, {"train_kl": kl, "train_penalty": penalty})

    def _step(self, calibrator: Calibrator, adam: torch.optim.Adam, weight: float, step: int) -> Tensor:
        """One step of Adam; the batch's mean KL and penalty before it, [2]."""
        adam.zero_grad(set_to_none=False)
        sums = torch.zeros(2, device=self.device)
        for numbers in self._share(self._order(step)):
            batch = self.documents.batch("fit", numbers)
            with torch.enable_grad():
                kl = self._divergence(calibrator, batch).mean(1).sum()
                penalty = calibrator.penalty(batch.base.layers).sum()
                loss = (kl + weight * penalty) / self.config.batch_size
            torch.autograd.backward(loss)
            sums += torch.stack((kl, penalty)).detach()
        parameters = list(calibrator.parameters())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        joined = self._sum(torch.cat([sums, *(gradient.flatten() for gradient in gradients)]))
        pieces = torch.split(joined[2:], [parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)
        adam.step()
        return joined[:2] / self.config.batch_size

    def _divergence(self, calibrator: Calibrator, batch: Batch) -> Tensor:
        with self.backward.over(self.receiver):
            return divergence(self.receiver, calibrator, batch)

    def _evaluate(
        self, training: Training, calibrator: Calibrator, adam: torch.optim.Adam, losses: dict[str, float]
    ) -> None:
        kl = float(self.validation_kl(calibrator).mean())
        if not kl < float("inf"):
            raise FitError(
                f"The validation KL of grid point {training.point} is {kl} after {training.step} steps; lower "
                "learning_rate and use a fresh work_dir, or, at 0 steps, look for a fault in the bridge's plan."
            )
        training.curve.append({"step": training.step, **losses, "validation_kl": kl})
        training.waited += 1
        if kl < training.best_kl:
            training.best_kl, training.best_step, training.waited = kl, training.step, 0
            training.tensors["best"] = {name: x.clone() for name, x in calibrator.tensors().items()}
        training.tensors |= {"now": calibrator.tensors(), "adam": moments(adam)}
        self._save(training)

    def _order(self, step: int) -> list[int]:
        """Documents of a step: the next `batch_size` of an endless row of seeded permutations."""
        count, size = len(self.documents.windows["fit"]), self.config.batch_size
        numbers = []
        for place in range(step * size, (step + 1) * size):
            generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + place // count)
            numbers.append(int(torch.randperm(count, generator=generator)[place % count]))
        return numbers

    def _share(self, numbers: Sequence[int]) -> list[list[int]]:
        """Micro-batches of this process."""
        size = self.config.micro_batch
        chunks = [list(numbers[start : start + size]) for start in range(0, len(numbers), size)]
        return chunks[self.process.process_index :: self.process.num_processes]

    def _sum(self, tensor: Tensor) -> Tensor:
        from accelerate.utils import reduce

        total: Tensor = reduce(tensor, "sum")
        return total

    def _save(self, training: Training) -> None:
        if self.process.is_main_process:
            training.save(self.path)
        self.process.wait_for_everyone()


def divergence(receiver: Any, calibrator: Calibrator, batch: Batch) -> Tensor:
    """KL(native ‖ hand-over) over the whole vocabulary, nats, float32 [B, P]."""
    state = HybridState(calibrator(batch.base.layers), batch.base.bookkeeping)
    logits = continue_from(receiver, state, batch.next_ids, differentiable=torch.is_grad_enabled()).logits
    log_p = batch.native.float().log_softmax(-1)  # [B, P, vocab]
    log_q = logits.float().log_softmax(-1).to(log_p.device)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
