"""One policy over all tasks: observe the context, generate the rest, keep what is to be compared.

Every arm meets the same pictures and the same noise. Tasks run in batches; a session's tensors are gone before
the next batch begins.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from statebridge.prune.adapters.small_world import SmallWorld
from statebridge.prune.benchmark.tasks import Tasks
from statebridge.prune.heads import HeadSplit, measure_split
from statebridge.prune.history import pruning_ratio
from statebridge.prune.policies import Full, Streaming
from statebridge.prune.policy import Policy
from statebridge.prune.rotary import Reindex
from statebridge.prune.session import PrunedSession

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Arm:
    """A policy, and how old keys are read.

    Attributes
    ----------
    name
        Unique among the arms of a run.
    policy
        What is kept.
    reindex
        Where old keys are read.
    """

    name: str
    policy: Policy
    reindex: Reindex | None = None


@dataclass(frozen=True, eq=False)
class ArmResult:
    """What an arm made.

    Attributes
    ----------
    frames
        Generated frames, float32 [N, G, 3, size, size].
    pr
        Pruning ratio over all chunks.
    pr_generated
        Pruning ratio over the generated chunks alone.
    cache_bytes
        Bytes of keys and values at the end, mean of a task.
    peak_bytes
        Most memory that was allocated on the device while running, 0 on a CPU; of a whole batch.
    scores
        Scores of the chunks that left the window, [chunks, N, tokens], where asked for.
    """

    frames: Tensor
    pr: float
    pr_generated: float
    cache_bytes: float
    peak_bytes: int
    scores: Tensor | None


def run_arm(
    backbone: SmallWorld,
    tasks: Tasks,
    arm: Arm,
    *,
    batch: int,
    seed: int = 0,
    probe_step: int = 2,
    keep_scores: bool = False,
    progress: Progress = lambda done, of: None,
) -> ArmResult:
    """Run an arm over all tasks.

    Parameters
    ----------
    batch
        Tasks at a time.
    seed
        Of the noise; arms that are compared need the same.
    probe_step
        Step of the schedule at which discrepancies are read.
    keep_scores
        Keep every chunk's scores.
    progress
        Called with chunks done, and chunks in all.
    """
    frames, seen, nbytes, scores = [], [], 0, []
    cuda = backbone.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    starts = range(0, len(tasks), batch)
    chunk = backbone.model.config.grid.frames
    total = len(starts) * (tasks.frames.shape[1] // chunk)
    done = 0
    for start in starts:
        part = tasks.rows(slice(start, start + batch))
        session = PrunedSession(
            backbone,
            arm.policy,
            batch=len(part),
            reindex=arm.reindex,
            probe_step=probe_step,
            seed=seed * 1_000 + start,
            noise_device=backbone.device,
        )
        kept: list[Tensor] = []
        for first in range(0, part.context, chunk):
            observe(session, part, first)
            if keep_scores and session.clock.chunk - 1 in session.pending:
                kept.append(session.pending[session.clock.chunk - 1].cpu())
            done += 1
            progress(done, total)
        made = [
            session.generate(part.condition(first, chunk)).final.float().cpu()
            for first in range(part.context, part.frames.shape[1], chunk)
        ]
        done += len(made)
        progress(done, total)
        frames.append(torch.cat(made, 1))
        scores.append(torch.stack(kept) if kept else torch.empty(0))
        seen += session.seen
        nbytes += session.cache.nbytes
        del session
        gc.collect()
    return ArmResult(
        torch.cat(frames),
        pruning_ratio(seen),
        pruning_ratio(seen, tasks.context // chunk),
        nbytes / len(tasks),
        torch.cuda.max_memory_allocated() if cuda else 0,
        torch.cat(scores, 1) if keep_scores else None,
    )


def observe(session: PrunedSession, tasks: Tasks, first: int) -> None:
    """Let a session observe the chunk of true frames that begins at frame `first`."""
    count = session.backbone.model.config.grid.frames  # type: ignore[attr-defined]
    session.observe(
        tasks.frames[:, first : first + count].to(session.backbone.device), tasks.condition(first, count)
    )


def split_heads(backbone: SmallWorld, tasks: Tasks, sink: int, window: int, share: float) -> HeadSplit:
    """Split heads by the attention of the last chunk, which looks at the target again, in up to 8 tasks."""
    rows = tasks.rows(slice(0, 8))
    session = PrunedSession(backbone, Full(sink, window), batch=len(rows), noise_device=backbone.device)
    chunk = backbone.model.config.grid.frames
    last = rows.frames.shape[1] - chunk
    for first in range(0, last, chunk):
        observe(session, rows, first)
    clean = rows.frames[:, last:].to(backbone.device)
    return measure_split(session, clean, rows.condition(last, chunk), share)


def streaming_at(ratio: float, chunks: int, sink: int, window: int) -> Streaming:
    """Return the streaming policy that shows as many positions as one that keeps `ratio` of what leaves `window`.

    Its window is the whole number of chunks that brings the positions, summed over `chunks` chunks, closest.
    """

    def shown(kept: float, wide: int) -> float:
        whole = sink + wide
        return sum(min(i, whole) + kept * max(0, i - whole) for i in range(chunks))

    wanted = shown(ratio, window)
    wide = min(range(window, chunks + 1), key=lambda w: abs(shown(0.0, w) - wanted))
    return Streaming(sink=sink, window=wide)


@dataclass(frozen=True)
class Speed:
    """Time of generating one chunk with a history in place.

    Attributes
    ----------
    seconds
        Median over the repeats.
    spread
        Shortest and longest repeat.
    peak_bytes
        Most memory that was allocated meanwhile, 0 on a CPU.
    """

    seconds: float
    spread: tuple[float, float]
    peak_bytes: int


@torch.no_grad()
def continuation_speed(
    backbone: SmallWorld, tasks: Tasks, arm: Arm, *, rows: int, repeats: int, seed: int = 0
) -> Speed:
    """Time the first generated chunk again and again, from one and the same history.

    Parameters
    ----------
    rows
        Tasks that continue together.
    repeats
        Timed runs, after two that are not counted.
    """
    part = tasks.rows(torch.arange(rows, device=tasks.actions.device) % len(tasks))
    session = PrunedSession(
        backbone, arm.policy, batch=rows, reindex=arm.reindex, seed=seed, noise_device=backbone.device
    )
    chunk = backbone.model.config.grid.frames
    for first in range(0, part.context, chunk):
        observe(session, part, first)
    condition = part.condition(part.context, chunk)
    cuda = backbone.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats + 2):
        again = copy.copy(session)  # caches are values: a step gives new ones and leaves these
        again.pending, again.seen = dict(session.pending), list(session.seen)
        if cuda:
            torch.cuda.synchronize()
        begun = time.perf_counter()
        again.generate(condition)
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    timed = times[2:]
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    return Speed(float(np.median(timed)), (min(timed), max(timed)), peak)


def thresholds(scores: Tensor, ratios: Sequence[float]) -> list[float]:
    """Return for each share the γ above which it lies, over all chunks and tasks together; −∞ for everything."""
    flat = scores.double().flatten().sort().values
    kept = [int(ratio * len(flat) + 0.5) for ratio in ratios]
    return [float(flat[len(flat) - count - 1]) if count < len(flat) else -math.inf for count in kept]
