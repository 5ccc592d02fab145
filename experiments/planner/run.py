"""Searches under a memory budget without a disk, one per policy, budget and text; and anchors under a tight budget.

    python -m experiments.planner.run checkpoints/source --out experiments/planner/results

Every arm runs the same search on the same texts. "Found" means: the path that the search finds with all branches in
memory. Intervals are paired over texts. With a disk nothing can be lost, and the question is how often it is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.planner.anchors import keep_anchors
from experiments.planner.search import Found, search
from statebridge.capture import identity_of
from statebridge.capture.load import load_model
from statebridge.evaluate.demo import installed_documents
from statebridge.evaluate.provenance import environment
from statebridge.sessions import SessionRuntime, SessionStore
from statebridge.sessions.policies import (
    LRU,
    TTL,
    GreedyDualSize,
    Pinned,
    Policy,
    PredictiveAdmission,
    PredictiveShrinking,
    Relevance,
)
from statebridge.stats import Bootstrap, mean

#: Fresh policies by name; times are counted in calls of the clock, of which a step makes about one.
POLICIES: dict[str, Callable[[], Policy]] = {
    "LRU": LRU,
    "size-aware": GreedyDualSize,
    "TTL": lambda: TTL(60),
    "relevance": Relevance,
    "pinned": lambda: Pinned(lambda session: session.relevance > -math.inf),  # every branch that is open
    "LRU + shrinking": PredictiveShrinking,
    "LRU + admission": PredictiveAdmission,
}
COMPARED = ("LRU", "relevance")
MEASURES = ("found", "completed", "kept")
#: The same for chats, of which the anchors alone are marked.
FOR_ANCHORS = POLICIES | {"pinned": lambda: Pinned(lambda session: session.relevance > 0)}
ROOMY = 1 << 40


class CountingStore(SessionStore):
    """Counts how often sessions came back from disk."""

    restored = 0

    def restore(self, identifier: str) -> Any:
        self.restored += 1
        return super().restore(identifier)


def texts(tokenizer: Any, count: int, tokens: int) -> list[torch.Tensor]:
    """Beginnings of the longest installed documents, int64 [1, T] each."""
    found = []
    for document in installed_documents()[:count]:
        found.append(torch.tensor([tokenizer(document.text)["input_ids"][100 : 100 + tokens]]))
    return found


def runtime(
    model: Any, policy: Policy, size: int, host: int = 1 << 20, store: SessionStore | None = None
) -> SessionRuntime:
    """A runtime for sessions of `size` bytes, `host` of them at rest; without a store it gives up those beyond."""
    calls = itertools.count()
    return SessionRuntime(
        model, store, size, host * size, policy, may_lose=True, clock=lambda: float(next(calls))
    )


def summary(found: list[Found], best: list[Found]) -> dict[str, Any]:
    """Columns over texts of one arm; `kept` is the share of the branches of the exact search that this one had."""
    pairs = list(zip(found, best, strict=True))
    return {
        "found": [float(f.path == b.path) for f, b in pairs],
        "completed": [float(f.completed) for f in found],
        "kept": [len({*f.continued} & {*b.continued}) / len(b.continued) for f, b in pairs],
        "nats_below_best": [b.score - f.score if f.completed else None for f, b in pairs],
        "lost": [f.lost for f in found],
        "refused": [f.refused for f in found],
    }


def searches(model: Any, prefixes: list[torch.Tensor], options: argparse.Namespace) -> dict[str, Any]:
    """All arms at all budgets, and the same with a disk at the smallest one."""
    shape = {"depth": options.depth, "width": options.width}
    best, sizes = [], []
    for prefix in prefixes:
        best.append(search(runtime(model, LRU(), ROOMY), prefix, **shape))
        run = runtime(model, LRU(), ROOMY)
        run.new("one")
        run.step(prefix)
        sizes.append(run.active.after(torch.zeros(1, options.depth, dtype=torch.int64)))
    arms: dict[str, Any] = {}
    for tidy, name, budget in itertools.product((False, True), POLICIES, options.budgets):
        if tidy and name not in COMPARED:
            continue
        found = [
            search(runtime(model, POLICIES[name](), size, budget), prefix, tidy=tidy, **shape)
            for prefix, size in zip(prefixes, sizes, strict=True)
        ]
        arm = arms[arm_name(name, budget, tidy)] = summary(found, best)
        print(arm_name(name, budget, tidy), {key: float(np.mean(arm[key])) for key in MEASURES}, flush=True)
    disk: dict[str, list[int]] = {}
    for name in COMPARED:
        counts = []
        for prefix, size, exact in zip(prefixes, sizes, best, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                store = CountingStore(Path(folder) / "store")
                run = runtime(model, POLICIES[name](), size, min(options.budgets), store)
                assert search(run, prefix, tidy=False, **shape).path == exact.path
                counts.append(store.restored)
        disk[name] = counts
        print("with a disk", name, np.mean(counts))
    return {
        "session_bytes": sizes,
        "exact": [{"score": found.score, "branches": len(found.continued)} for found in best],
        "arms": arms,
        "restored_from_disk": disk,
    }


def arm_name(policy: str, budget: int, tidy: bool) -> str:
    """Key of an arm in the results."""
    return f"{policy} | {budget} | {'tidy' if tidy else 'untidy'}"


def intervals(measured: dict[str, Any], budgets: list[int]) -> dict[str, Any]:
    """Paired differences relevance − LRU over texts."""
    bootstrap = Bootstrap(seed=0)
    out: dict[str, Any] = {}
    for tidy, budget in itertools.product((False, True), budgets):
        theirs, ours = (measured["arms"][arm_name(name, budget, tidy)] for name in COMPARED)
        out[arm_name("difference", budget, tidy)] = {
            key: dataclasses.asdict(bootstrap(lambda a, b: mean(a) - mean(b), ours[key], theirs[key]))
            for key in MEASURES
        }
    reads = measured["restored_from_disk"]
    out["restored_from_disk"] = dataclasses.asdict(
        bootstrap(lambda a, b: mean(a) - mean(b), reads["relevance"], reads["LRU"])
    )
    return out


def main() -> None:
    """Run everything and write results.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a model with its tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--depth", type=int, default=5)
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="+", default=[3, 6, 12])
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model, dtype=torch.float32)
    prefixes = texts(tokenizer, options.texts, options.tokens)
    measured = searches(model, prefixes, options)
    measured["relevance_minus_LRU"] = intervals(measured, options.budgets)
    measured["anchors"] = {
        name: keep_anchors(model, policy, prefixes[:16]) for name, policy in FOR_ANCHORS.items()
    }
    for name, kept in measured["anchors"].items():
        print("anchors", name, kept)
    settings = {k: v for k, v in vars(options).items() if k not in ("out", "model")}
    options.out.mkdir(parents=True, exist_ok=True)
    settings["weights"] = identity_of(model).weights
    result = {"settings": settings, "environment": environment(processes=1), **measured}
    (options.out / "results.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
