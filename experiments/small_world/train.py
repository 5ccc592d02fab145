"""Train the small world model, in one call or in several that resume.

    loss = mean |x0 - model(x_σ, σ, context)|²,     σ mostly from the sampler's four levels

Teacher forcing over a doubled sequence (doubled.py), Muon for the matrices of the blocks and AdamW for the rest,
bf16 compute and float32 weights on a GPU, an average of the weights for shipping. Everything that a step draws is
a function of the seed and the step's number. The number of steps is fixed once: given, or measured from the first
steps and the minutes that the run may take. The state on disk holds weights, average, optimisers and step.

    python -m experiments.small_world.train --folder runs/world --minutes 14 --seconds 520   (again until done)
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from experiments.small_world.config import TINY, TrainConfig
from experiments.small_world.phase import PhaseRun
from statebridge.worlds import WorldModel
from statebridge.worlds.weights import load_world, save_world

Tensor = torch.Tensor

_MEASURED = (30, 90)  # steps between which the speed is measured
_LONGER = 1.3  # how much slower a step of the last phase was found to be, where only the first is measured


class Run:
    """The state of a run, and its loop."""

    def __init__(self, config: TrainConfig, folder: Path, device: torch.device) -> None:
        torch.manual_seed(config.seed)
        self.config, self.folder = config, folder
        self.model = WorldModel(config.model).to(device)
        if device.type == "cuda":
            torch._dynamo.config.recompile_limit = 64  # two lengths, and one graph a layer at the worst
            for block in self.model.blocks:
                block.compile(dynamic=False)
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2 and min(p.shape) > 6]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(
                others, lr=config.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
            ),
        ]
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.step, self.steps, self.seconds = 0, 0, 0.0

    @property
    def state_file(self) -> Path:
        """Where the run resumes from."""
        return self.folder / "state.pt"

    def save(self) -> None:
        """Write the state and the model as it would ship."""
        content = {
            "model": self.model.state_dict(),
            "average": self.average,
            "optimisers": [o.state_dict() for o in self.optimisers],
            "counts": [self.step, self.steps, self.seconds],
        }
        temporary = self.state_file.with_suffix(".tmp")
        torch.save(content, temporary)
        temporary.replace(self.state_file)
        shipped = self.averaged()
        counts = {"step": self.step, "steps": self.steps, "seconds": round(self.seconds, 1)}
        save_world(self.folder / "model", shipped, counts)

    def resume(self) -> None:
        """Continue from the state on disk, if there is one."""
        if not self.state_file.exists():
            return
        content = torch.load(self.state_file, map_location=self.model.device, weights_only=True)
        self.model.load_state_dict(content["model"])
        self.average = content["average"]
        for optimiser, state in zip(self.optimisers, content["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.step, self.steps, self.seconds = content["counts"]

    def start_from(self, folder: Path) -> None:
        """Go on from a model as it ships, where the state of its run is lost; the optimisers begin anew."""
        counts = json.loads((folder / "config.json").read_text(encoding="utf-8"))["training"]
        self.step, self.steps, self.seconds = counts["step"], counts["steps"], counts["seconds"]
        given = load_world(folder, self.model.device)
        self.model.load_state_dict(given.state_dict())
        self.average = [p.detach().clone() for p in self.model.parameters()]

    def averaged(self) -> WorldModel:
        """A copy of the model with the average of its weights."""
        copy = WorldModel(self.config.model).to(self.model.device)
        with torch.no_grad():
            for p, value in zip(copy.parameters(), self.average, strict=True):
                p.copy_(value)
        return copy

    def train(self, seconds: float, minutes: float) -> None:
        """Take steps until the run is done or the time of this call is up."""
        begin, saved, marked = time.monotonic(), time.monotonic(), None
        before, phase, run, losses = self.seconds, None, None, []
        while not self.steps or self.step < self.steps:
            wanted = self.config.phase(self.step, self.steps) if self.steps else self.config.phases[0]
            if run is None or wanted is not phase:
                phase = wanted
                # every phase has seeds of its own
                run = PhaseRun(self.config, phase, self.model, (1 + self.config.phases.index(phase)) * 2**28)
                marked = None
            losses.append(self._step(run))
            self.step += 1
            if marked is None:
                self._synchronise()
                marked = (self.step, time.monotonic())
            if self.step == _MEASURED[0] and not self.steps:
                self._synchronise()
                marked = (self.step, time.monotonic())
            if self.step == _MEASURED[1] and not self.steps:
                self.steps = self._affordable(minutes, marked)
                self._log({"steps": self.steps})
            now = time.monotonic()
            if self.step % 50 == 0 or (self.steps and self.step == self.steps):
                self._synchronise()
                pace = (time.monotonic() - marked[1]) / max(1, self.step - marked[0])
                tokens = 2 * run.phase.sequences * run.phase.chunks * run.tokens
                rate = round(tokens / pace) if pace else None
                loss = float(torch.stack(losses).mean())
                self._log(
                    {"step": self.step, "loss": loss, "tokens_per_second": rate, "chunks": phase.chunks}
                )
                losses = []
                marked = (self.step, time.monotonic())
            over = now - begin > seconds
            if over or now - saved > 60 or (self.steps and self.step == self.steps):
                self.seconds = before + now - begin
                self._validate(run)
                self.save()
                saved = time.monotonic()
                marked = (self.step, time.monotonic())
            if over:
                return

    def _step(self, run: PhaseRun) -> Tensor:
        c = self.config
        warm = min(1.0, (self.step + 1) / c.warmup)
        done = self.step / self.steps if self.steps else 0.0
        rate = c.lr * warm * (c.final_lr + (1 - c.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate
        loss = run.loss(self.step)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():  # early on the average follows quickly
            share = 1 - min(c.ema, (self.step + 1) / (self.step + 10))
            torch._foreach_lerp_(self.average, list(self.model.parameters()), share)
        return loss.detach()

    def _affordable(self, minutes: float, marked: tuple[int, float]) -> int:
        self._synchronise()
        pace = (time.monotonic() - marked[1]) / (self.step - marked[0])
        mean = sum(
            p.share * (1.0 if p.chunks == self.config.phases[0].chunks else _LONGER)
            for p in self.config.phases
        )
        return max(self.step + 1, int(minutes * 60 / (pace * mean)))

    def _validate(self, run: PhaseRun) -> None:
        parameters = list(self.model.parameters())
        kept = [p.detach().clone() for p in parameters]
        with torch.no_grad():
            torch._foreach_copy_(parameters, self.average)
        measured = run.validate()
        with torch.no_grad():
            torch._foreach_copy_(parameters, kept)
        self._log({"step": self.step, "seconds": round(self.seconds, 1), "validation": measured})

    def _synchronise(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def _log(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry)
        print(line, flush=True)
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path("runs/world"))
    parser.add_argument(
        "--minutes", type=float, default=16.0, help="fixes the number of steps where --steps is not given"
    )
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call; call again to go on")
    parser.add_argument(
        "--start", type=Path, help="folder of a model to go on from where there is no state.pt"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a run that only shows that the loop works")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    run = Run(TINY if options.tiny else TrainConfig(), options.folder, torch.device(options.device))
    if options.start is not None and not run.state_file.exists():
        run.start_from(options.start)
    run.resume()
    run.steps = run.steps or options.steps
    run.train(options.seconds, options.minutes)
    done = 0 < run.steps <= run.step
    print("done" if done else f"step {run.step} of {run.steps}: call again to go on")


if __name__ == "__main__":
    main()
