"""`statebridge prune`: run pruning policies over tasks of the small world, beside full KV.

Shows progress on stderr and a table on stdout; tasks, scores and arms are the prune room's.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from statebridge.cli.options import DeviceOption, Format, FormatOption, SeedOption, print_json, stage_bars
from statebridge.cli.worlds import FIRST_SEED, WorldOption, load_backbone, require_writable, whole_chunks
from statebridge.errors import PruneError

if TYPE_CHECKING:
    from statebridge.prune import Policy
    from statebridge.prune.adapters.small_world import SmallWorld
    from statebridge.prune.benchmark.tasks import Tasks


def prune(
    policies: Annotated[
        list[str] | None,
        typer.Argument(metavar="[POLICY]...", help="Policies to run; all of them by default."),
    ] = None,
    world: WorldOption = None,
    threshold: Annotated[
        float | None, typer.Option(help="Keep tokens with a larger score, such as DeCoPrune's γ.")
    ] = None,
    keep_ratio: Annotated[
        float | None, typer.Option(help="Keep this share of each chunk instead; 0.1 by default.")
    ] = None,
    sink: Annotated[int, typer.Option(help="First chunks that stay whole.")] = 1,
    window: Annotated[int, typer.Option(help="Latest chunks that stay whole.")] = 2,
    probe_step: Annotated[
        int, typer.Option(help="Step of the schedule at which discrepancies are read.")
    ] = 2,
    recent: Annotated[float, typer.Option(help="With --span: frames back that keep their times.")] = 16.0,
    span: Annotated[
        float | None, typer.Option(help="Re-index old keys into this many frames; off by default.")
    ] = None,
    share: Annotated[float, typer.Option(help="Share of dynamic heads in decoprune_hs.")] = 0.5,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks to run.")] = 4,
    context: Annotated[int, typer.Option(min=36, help="Frames that are observed first.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Tasks at a time.")] = 8,
    out: Annotated[Path | None, typer.Option(help="PNG file for strips of frames.")] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    format: FormatOption = Format.human,
) -> None:
    """Prune a video model's history and see what it still knows: an object is looked at, left, and looked at again.

    [bold]Examples[/bold]

        statebridge prune decoprune random --keep-ratio 0.1 --out strips.png

        statebridge prune decoprune --threshold 0.02 --tasks 16 --context 240 --format json
    """
    from rich.console import Console

    from statebridge.prune import POLICIES, Full, Reindex
    from statebridge.prune.benchmark.arms import Arm, run_arm
    from statebridge.prune.benchmark.scores import psnr, score
    from statebridge.prune.benchmark.tasks import make_tasks

    chosen = list(dict.fromkeys(policies or POLICIES))
    unknown = [name for name in chosen if name not in POLICIES]
    if unknown:
        raise PruneError(f"There is no policy {unknown[0]!r}; choose among {', '.join(POLICIES)}.")
    if threshold is None and keep_ratio is None:
        keep_ratio = 0.1
    reindex = None if span is None else Reindex(recent, span)
    if out is not None:
        require_writable(out)
    backbone = load_backbone(world, device)
    shown = make_tasks(tasks, FIRST_SEED + 1000 * seed, whole_chunks(context, backbone), backbone.device)
    arms = [Arm("full", Full(sink, window), reindex)]
    for name in chosen:
        if name != "full":
            policy = _policy(name, sink, window, threshold, keep_ratio, share, backbone, shown)
            arms.append(Arm(name, policy, reindex))
    rows, made = [], {}
    with stage_bars(Console(stderr=True)) as progress:
        for arm in arms:
            begun = time.perf_counter()
            done = run_arm(
                backbone,
                shown,
                arm,
                batch=batch,
                seed=seed,
                probe_step=probe_step,
                progress=functools.partial(progress, arm.name),
            )
            scores = score(done.frames, shown.truth.cpu(), shown.target.cpu())
            made[arm.name] = done.frames
            rows.append(
                {
                    "policy": arm.name,
                    "pr": done.pr,
                    "cache_bytes": done.cache_bytes,
                    "target_psnr_db": float(psnr(scores["target_mse"].mean())),
                    "view_psnr_db": float(psnr(scores["view_mse"].mean())),
                    "target_missed": float(scores["target_missed"].mean()),
                    "seconds": time.perf_counter() - begun,
                }
            )
    if out is not None:
        _save(shown, made, out)
    if format is Format.json:
        print_json(
            {"tasks": shown.names, "context": shown.context, "policies": rows, "out": out and str(out)}
        )
    else:
        _print(rows, out)


def _policy(
    name: str,
    sink: int,
    window: int,
    threshold: float | None,
    keep_ratio: float | None,
    share: float,
    backbone: SmallWorld,
    tasks: Tasks,
) -> Policy:
    from statebridge.prune import POLICIES, ScoredPolicy
    from statebridge.prune.benchmark.arms import split_heads

    settings: dict[str, Any] = {"sink": sink, "window": window}
    if issubclass(POLICIES[name], ScoredPolicy):
        settings |= {"threshold": threshold, "keep_ratio": keep_ratio}
    if name == "decoprune_hs":
        settings["split"] = split_heads(backbone, tasks, sink, window, share)
    return POLICIES[name](**settings)


def _save(tasks: Tasks, made: dict[str, Any], out: Path) -> None:
    from statebridge.prune.benchmark.strips import as_bytes, save_strips

    save_strips(
        [
            {"truth": as_bytes(tasks.truth[i])} | {name: as_bytes(frames[i]) for name, frames in made.items()}
            for i in range(len(tasks))
        ],
        out,
    )


def _print(rows: Sequence[dict[str, Any]], out: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("POLICY", "PR", "CACHE A TASK", "TARGET", "VIEW", "TARGET MISSED", "SECONDS", box=None)
    for row in rows:
        table.add_row(
            row["policy"],
            f"{100 * row['pr']:.1f} %",
            f"{row['cache_bytes'] / 2**20:.1f} MiB",
            f"{row['target_psnr_db']:.2f} dB",
            f"{row['view_psnr_db']:.2f} dB",
            f"{100 * row['target_missed']:.0f} %",
            f"{row['seconds']:.1f}",
        )
    Console(highlight=False, markup=False).print(table)
    if out is not None:
        typer.echo(str(out))
