"""`statebridge worlds`: a small world to look at."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from statebridge.cli.options import DeviceOption, Format, FormatOption, SeedOption, print_json, stage_bars
from statebridge.errors import ConfigError

if TYPE_CHECKING:
    from statebridge.prune.adapters.small_world import SmallWorld

#: First candidate scene of the verbs; neither training nor the benchmark uses these.
FIRST_SEED = 2**31 + 50_000_000

worlds = typer.Typer(no_args_is_help=True, help="Walk through a small world that a video model remembers.")

WorldOption = Annotated[
    Path | None, typer.Option("--world", help="Folder of a world model; checkpoints/world by default.")
]


@worlds.callback()
def _verbs() -> None:
    # one verb for now; without a callback typer would drop its name
    return


@worlds.command()
def demo(
    out: Annotated[Path, typer.Option(help="PNG file to write.")] = Path("world.png"),
    world: WorldOption = None,
    tasks: Annotated[int, typer.Option(min=1, help="Worlds to look at.")] = 2,
    context: Annotated[int, typer.Option(min=36, help="Frames that the model sees first.")] = 64,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    format: FormatOption = Format.human,
) -> None:
    """Look at an object, turn away, and look again: drawn from all history, and from the latest chunk alone.

    [bold]Examples[/bold]

        statebridge worlds demo

        statebridge worlds demo --tasks 4 --out strips.png
    """
    import numpy as np
    from rich.console import Console

    from statebridge.prune import Full, Streaming
    from statebridge.prune.benchmark.arms import Arm, run_arm
    from statebridge.prune.benchmark.scores import psnr, score
    from statebridge.prune.benchmark.strips import as_bytes, save_strips
    from statebridge.prune.benchmark.tasks import LOOK, make_tasks

    require_writable(out)
    backbone, begun = load_backbone(world, device), time.perf_counter()
    shown = make_tasks(tasks, FIRST_SEED + 1000 * seed, whole_chunks(context, backbone), backbone.device)
    truth, target = shown.truth.cpu(), shown.target.cpu()
    arms = [Arm("all history", Full()), Arm("latest chunk", Streaming(sink=0, window=1))]
    made, result = {}, {}
    with stage_bars(Console(stderr=True)) as progress:
        for arm in arms:
            frames = run_arm(
                backbone, shown, arm, batch=tasks, progress=functools.partial(progress, arm.name)
            ).frames
            made[arm.name] = as_bytes(frames)
            scores = score(frames, truth, target)
            result[arm.name] = {name: float(psnr(scores[name].mean())) for name in ("target_mse", "view_mse")}
    first = np.full_like(made[arms[0].name], 255)  # one picture, and nothing beside it
    first[:, :1] = as_bytes(shown.frames[:, LOOK : LOOK + 1])
    blocks: list[dict[str, Any]] = [
        {"seen early": first[i], "truth": as_bytes(truth[i])}
        | {name: frames[i] for name, frames in made.items()}
        for i in range(tasks)
    ]
    save_strips(blocks, out)
    seconds = time.perf_counter() - begun
    if format is Format.json:
        psnrs = {
            name: {key.replace("_mse", "_psnr_db"): x for key, x in row.items()}
            for name, row in result.items()
        }
        print_json({"arms": psnrs, "tasks": shown.names, "seconds": seconds, "out": str(out)})
        return
    for name, row in result.items():
        typer.echo(f"{name:14s} target {row['target_mse']:.1f} dB, whole view {row['view_mse']:.1f} dB")
    typer.echo(f"{out} ({seconds:.0f} s)")


def load_backbone(world: Path | None, device: str) -> SmallWorld:
    """The model of `--world`, of `checkpoints/world` here, or of the package's checkout.

    Raises
    ------
    ConfigError
        When there is none, or the device is not there.
    """
    import torch

    import statebridge
    from statebridge.prune.adapters.small_world import SmallWorld
    from statebridge.worlds.weights import load_world

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch is built without that device
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"The device {device!r} cannot be used ({reason}); give cpu, cuda or auto."
        ) from error
    beside = Path(statebridge.__file__).parents[1] / "checkpoints" / "world"
    places = [world] if world is not None else [Path("checkpoints/world"), beside]
    for place in places:
        if (place / "config.json").is_file():
            return SmallWorld(load_world(place, device))
    raise ConfigError(
        f"There is no world model in {' or '.join(map(str, places))}; run from a checkout of the project, or give "
        "the folder with --world."
    )


def require_writable(out: Path) -> None:
    """Refuse a picture that could not be saved, before the minutes that drawing it takes."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = not out.exists()
        out.open("ab").close()
        if fresh:
            out.unlink()
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror}); give another --out.") from error


def whole_chunks(frames: int, backbone: SmallWorld) -> int:
    """Frames rounded up to whole chunks."""
    chunk = backbone.model.config.grid.frames
    return -(-frames // chunk) * chunk
