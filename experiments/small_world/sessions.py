"""Sessions over worlds: what each runtime needs, whether it comes back, and what a tight memory keeps.

Fingerprints are discovered with no hint, each at lengths before and after the window has rolled. Conformance sends
every runtime away and brings impostors. Then sixteen worlds share a memory that holds little more than one session
each: every world is seen once from its anchor, and forks drafts that wander off and stay open; at the end each
returns. It is kept when its anchor is still there and goes on exactly as one that never shared its memory. At last a
planner looks for a view that it has seen, by a tree of forks, with room for few of them.

    python -m experiments.small_world.sessions checkpoints/world --out experiments/small_world/results
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.small_world.judge import error, psnr, walked
from statebridge.errors import BudgetError, StoreError
from statebridge.sessions import SessionRuntime
from statebridge.sessions.conformance import EXCURSIONS, AnotherProcess, conform
from statebridge.sessions.fingerprint import Fingerprint, max_difference
from statebridge.sessions.policies import LRU, Policy, Relevance
from statebridge.sessions.session import Buffer, BufferSpec
from statebridge.worlds import WorldModel
from statebridge.worlds.motion import FORWARD, LEFT, RIGHT, STAY, moves_of
from statebridge.worlds.runtimes import BankSession, MarkovSession, WindowedSession, WorldEngine, WorldSession
from statebridge.worlds.weights import load_world

SEED = 2**31 + 30_000_000  # of worlds that training never saw
ROOMY = 1 << 40
POLICIES: dict[str, Callable[[], Policy]] = {"recency": LRU, "relevance": Relevance}
#: Window of the windowed runtime: one chunk that stays for good and three latest ones.
WINDOW = {"window": 3, "sink": 1}
KINDS: dict[str, tuple[type[WorldSession], dict[str, Any]]] = {
    "Markov": (MarkovSession, {}),
    "memory bank": (BankSession, {"retrieve": 3}),
    "windowed keys": (WindowedSession, WINDOW),
}
PATH = ([LEFT, LEFT, LEFT, LEFT], [FORWARD, STAY, FORWARD, LEFT], [RIGHT, RIGHT, FORWARD, RIGHT])


def seen(model: WorldModel, world: int, actions: list[int]) -> dict[str, Any]:
    """What a session has seen after true walking, as `WorldSession.observe` takes it."""
    seeds = torch.tensor([SEED + world], device=model.device)
    found = walked(model, seeds, torch.tensor([actions], device=model.device))
    poses = found.conditioning.poses[0].cpu()
    return {
        "frames": found.frames[0].cpu(),
        "actions": actions,
        "moves": moves_of(torch.cat([poses[:1], poses])),
    }


def session_of(model: WorldModel, kind: str, world: int = 0) -> WorldSession:
    """A session that saw two chunks of a world."""
    make, options = KINDS[kind]
    session = make(model, seed=world, **options)
    session.observe(**seen(model, world, [STAY] * 4 + [LEFT] * 4))
    return session


def at_lengths(
    model: WorldModel, kind: str, lengths: tuple[int, ...], world: int = 0
) -> dict[int, list[Buffer]]:
    """Buffers of one session at several lengths in chunks, the first two of them seen."""
    session, found = session_of(model, kind, world), {}
    for chunk in range(2, max(lengths) + 1):
        if chunk in lengths:
            found[chunk] = list(session.buffers())
        session.step(PATH[chunk % 3])
    return found


def fingerprint(model: WorldModel, kind: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """What is needed at these lengths, and the table behind it."""
    make, options = KINDS[kind]
    own, other = (at_lengths(model, kind, lengths, world) for world in (0, 1))

    def loads(buffers: list[Buffer]) -> Callable[[WorldSession], None]:
        return lambda session: session.load(buffers)

    def group(spec: BufferSpec) -> str:
        return "keys and values" if spec.name.startswith("layers.") else spec.name

    found = Fingerprint.discover(
        lambda: make(model, **options),
        {n: loads(buffers) for n, buffers in own.items()},
        lambda session: session.step(PATH[0]).numpy(),
        max_difference,
        other={n: loads(buffers) for n, buffers in other.items()},
        group=group,
    )
    return {"lengths": lengths, "table": found.markdown(), **found.to_json()}


def conformance(model: WorldModel, kind: str) -> dict[str, Any]:
    """Excursions and impostors; the new process has a test of its own."""
    make, options = KINDS[kind]
    own, other = at_lengths(model, kind, (3, 5)), at_lengths(model, kind, (5,), 1)
    verdict = conform(
        lambda: make(model, **options),
        lambda session: session.load(own[5]),
        lambda session: session.step(PATH[0]).numpy(),
        max_difference,
        other=lambda session: session.load(other[5]),
        earlier=lambda session: session.load(own[3]),
        wander=lambda session: session.step(PATH[1]),
        excursions=[e for e in EXCURSIONS if not isinstance(e, AnotherProcess)],
    )
    return {"table": verdict.markdown(), **verdict.to_json()}


def runtime(engine: WorldEngine, policy: Policy, host_budget: int) -> SessionRuntime:
    """A runtime without a disk, which gives up sessions when memory is short."""
    calls = itertools.count()
    return SessionRuntime(
        engine, None, ROOMY, host_budget, policy, may_lose=True, clock=lambda: float(next(calls))
    )


def keep_worlds(
    model: WorldModel, policy: Callable[[], Policy], worlds: int, rounds: int = 3
) -> dict[str, Any]:
    """Anchors that are still there after drafts of all worlds have wandered, and how near their view is."""
    engine = WorldEngine(model, WindowedSession, **WINDOW)
    begin = [{"seed": w, **seen(model, w, [STAY] * 4 + [LEFT] * 4)} for w in range(worlds)]
    alone = [engine.fresh(**b) for b in begin]
    run = runtime(engine, policy(), (worlds + 3) * alone[0].after(PATH[0]))
    for world in range(worlds):
        run.new(f"anchor {world}", **begin[world])
        run.mark(f"anchor {world}", 1.0)
    for turn, world in itertools.product(range(rounds), range(worlds)):
        try:
            run.fork(f"anchor {world}", f"draft {world} {turn}", switch=True)
            run.step(PATH[turn % 3])
        except (BudgetError, StoreError):  # the anchor is gone already
            continue
    kept, views = 0, []
    for world in range(worlds):
        expected = alone[world].step([RIGHT] * 4)
        try:
            run.switch(f"anchor {world}")
        except StoreError:
            continue
        returned = run.step([RIGHT] * 4)
        kept += torch.equal(returned, expected)
        views.append(float(psnr(error(returned[-1], begin[world]["frames"][0]))))
    return {"kept": kept, "worlds": worlds, "view_psnr_of_kept": float(np.mean(views)) if views else None}


def plan(run: SessionRuntime, begin: Mapping[str, Any], goal: torch.Tensor, depth: int) -> dict[str, Any]:
    """The chunk of actions after chunk of actions whose last frame is nearest to a view, best first.

    Every node is a fork; none says when it is finished. The nodes that may still be expanded are marked with how
    near they are. A node whose session was lost cannot be expanded.
    """
    run.new("root", **begin)
    frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    best, path, lost, expanded = float("inf"), (), 0, 0
    while frontier:
        _, node = heapq.heappop(frontier)
        if len(node) == depth:
            continue
        name = "-".join(map(str, ("root", *node)))
        for action in (LEFT, RIGHT, FORWARD):
            child = (*node, action)
            try:
                run.fork(name, "-".join(map(str, ("root", *child))), switch=True)
            except StoreError:
                lost += 1
                continue
            far = float(error(run.step([action] * 4)[-1], goal))
            run.mark("-".join(map(str, ("root", *child))), 1 - far if len(child) < depth else -1.0)
            heapq.heappush(frontier, (far, child))
            if far < best:
                best, path = far, child
        expanded += 1
        if name not in run.usage().lost:
            run.mark(name, -1.0)
    return {"path": path, "squared_error": best, "branches_lost": lost, "expanded": expanded}


def plans(model: WorldModel, worlds: int, depth: int, memory: int) -> dict[str, Any]:
    """For each world: turn all the way round, then look for the view four steps behind; exact, then both policies.

    Reached means at most half as far again from the view as the search with all branches in memory came.
    """
    engine = WorldEngine(model, WindowedSession, window=4, sink=1)
    found: dict[str, list[dict[str, Any]]] = {"exact": [], **{name: [] for name in POLICIES}}
    around = [STAY] * 4 + [LEFT] * 16
    for world in range(worlds):
        begin = {"seed": world, **seen(model, world, around)}
        goal = seen(model, world, [*around, *[LEFT] * 8, *[FORWARD] * 4])["frames"][-1]
        size = engine.fresh(**begin).nbytes()
        for name, results in found.items():
            policy, budget = (LRU(), ROOMY) if name == "exact" else (POLICIES[name](), memory * size)
            results.append(plan(runtime(engine, policy, budget), begin, goal, depth))

    def mean(results: list[dict[str, Any]], key: str) -> float:
        return float(np.mean([r[key] for r in results]))

    near = [1.5 * result["squared_error"] for result in found["exact"]]
    return {
        name: {
            "worlds": worlds,
            "reached": sum(r["squared_error"] <= limit for r, limit in zip(results, near, strict=True)),
            **{key: mean(results, key) for key in ("expanded", "branches_lost", "squared_error")},
            "paths": [r["path"] for r in results],
        }
        for name, results in found.items()
    }


def main() -> None:
    """Run everything and write sessions.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--planned", type=int, default=8, help="worlds of the planner")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    model, begin = load_world(options.model, options.device), time.monotonic()
    result: dict[str, Any] = {"device": options.device, "torch": torch.__version__, "fingerprints": {}}
    lengths = {"Markov": [(2, 4, 8)], "memory bank": [(2, 4, 8)], "windowed keys": [(2, 4), (2, 5, 8)]}
    for kind in KINDS:
        for anchors in lengths[kind]:
            found = result["fingerprints"][f"{kind}, chunks {anchors}"] = fingerprint(model, kind, anchors)
            print(kind, anchors, found["needed"], flush=True)
    result["conformance"] = {kind: conformance(model, kind) for kind in KINDS}
    print({kind: found["passed"] for kind, found in result["conformance"].items()}, flush=True)
    result["worlds_kept"] = {
        name: keep_worlds(model, policy, options.worlds) for name, policy in POLICIES.items()
    }
    print(result["worlds_kept"], flush=True)
    result["planner"] = plans(model, options.planned, options.depth, memory=4)
    print(result["planner"], flush=True)
    result["seconds"] = round(time.monotonic() - begin, 1)
    (options.out / "sessions.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
