"""What a runtime costs and saves: memory by number of sessions, sessions by budget, switch time, checkpoint speed.

    python -m experiments.session_runtime.run checkpoints/source --out experiments/session_runtime/results

Memory is counted from the tensors that are alive in the process, independently of the runtime's own accounting, which
must agree. On the CPU "device" is the active session's cache, and both tiers are the machine's memory; with
`--device cuda` it is what the allocator says. Times are medians and mean something as ratios within one run.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.sessions import measure
from statebridge.capture import identity_of, prefill, restore
from statebridge.capture.load import load_model
from statebridge.evaluate.provenance import environment
from statebridge.sessions import SessionRuntime, SessionStore
from statebridge.state import HybridState

ROOMY = 1 << 50


def live_storages() -> dict[int, int]:
    """Bytes by address of the memory behind all tensors of the process, on whatever device."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of modules that are only looked at
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def held(before: dict[int, int]) -> int:
    """Bytes that have come to life since."""
    return sum(nbytes for pointer, nbytes in live_storages().items() if pointer not in before)


def ids_of(model: Any, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [1, T]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, model.config.vocab_size, (1, length), generator=generator)


def by_count(model: Any, counts: list[int], tokens: int, every_cache_up_to: int) -> list[dict[str, Any]]:
    """Bytes held with 1 … N sessions of `tokens` tokens each; beside it, a live cache for each of them."""
    rows = []
    generator = torch.Generator(model.device).get_state().numel()  # which torch keeps outside tensors
    before = live_storages()
    run = SessionRuntime(model, None, ROOMY, ROOMY)
    for number in range(1, max(counts) + 1):
        run.new(f"s{number}")
        run.step(ids_of(model, tokens, number))
        if number in counts:
            usage = run.usage()
            row = {
                "sessions": number,
                "device_bytes": usage.device,
                "host_bytes": usage.host,
                "tensor_bytes": held(before) + number * generator,
            }
            if model.device.type == "cuda":
                row["allocated"] = torch.cuda.memory_allocated()
            rows.append(row)
            print(row, flush=True)
    del run
    before = live_storages()
    caches = []
    for number in range(1, every_cache_up_to + 1):
        caches.append(prefill(model, ids_of(model, tokens, number)))
        caches[-1].logits = torch.empty(0)
        for row in rows:
            if row["sessions"] == number:
                row["every_cache_bytes"] = held(before)
    return rows


def by_budget(model: Any, lengths: list[int], device: int, host: int, opened: int) -> list[dict[str, Any]]:
    """Where sessions are when more are opened than fit, and how many fit when all must stay on the device."""
    rows = []
    for length in lengths:
        state = prefill(model, ids_of(model, length)).state().to("cpu")
        sizing = SessionRuntime(model, None, ROOMY, ROOMY)
        sizing.new("one", state=state)
        size = sizing.usage().device
        fitting = _live_caches(model, state, device, opened)
        with tempfile.TemporaryDirectory() as folder:
            store = SessionStore(Path(folder) / "store")
            run = SessionRuntime(model, store, device, host)
            for number in range(opened):
                run.new(f"s{number}", state=state.clone())
            usage = run.usage()
        rows.append(
            {
                "tokens": length,
                "session_bytes": size,
                "every_cache_on_device": fitting,
                "in_memory": len(usage.on_host) + 1,
                "reachable": len(usage.on_host) + 1 + len(usage.on_disk),
                "lost": len(usage.lost),
            }
        )
        print(rows[-1], flush=True)
    return rows


def _live_caches(model: Any, state: HybridState, budget: int, most: int) -> int:
    """How many live caches of a state fit into a budget."""
    before = live_storages()
    caches: list[Any] = []
    while len(caches) <= most and held(before) <= budget:
        caches.append(restore(state, model))
    return len(caches) - 1


def timed(model: Any, function: Callable[[], Any], repeats: int) -> float:
    """Median seconds, the device's work included."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _copy(state: HybridState, device: torch.device) -> None:
    """A session's way onto the device and another one's off it, as plain copies."""
    there = state.map(lambda _, t: t.to(device, copy=True))
    there.map(lambda _, t: t.to("cpu", copy=True))


def by_size(model: Any, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    """Seconds of a switch from the host and from disk, of plain copies, and of reading the prefix again."""
    rows = []
    for length in lengths:
        ids = ids_of(model, length)
        live = prefill(model, ids)
        state = live.state().to("cpu")
        reading = timed(model, lambda ids=ids: prefill(model, ids), max(repeats // 4, 1))
        with tempfile.TemporaryDirectory() as folder:
            run = SessionRuntime(model, SessionStore(Path(folder) / "store"), ROOMY, ROOMY)
            run.new("a", state=state.clone())
            run.new("b", state=state.clone())

            def both(run: SessionRuntime = run) -> None:
                run.switch("a")
                run.switch("b")

            def from_disk(run: SessionRuntime = run) -> None:
                run.evict("a")  # it has not changed, so nothing is written
                run.switch("a")
                run.switch("b")

            host = timed(model, both, repeats) / 2
            run.checkpoint("a")
            disk = timed(model, from_disk, max(repeats // 2, 1)) - host
        copies = timed(model, lambda state=state: _copy(state, model.device), repeats)
        rows.append(
            {
                "tokens": length,
                "state_bytes": sum(state.nbytes().values()),
                "switch_from_host_s": host,
                "switch_from_disk_s": disk,
                "plain_copies_s": copies,
                "reading_again_s": reading,
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure everything and write results.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of a model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 3, 10, 30, 100, 300, 1000])
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each of the many sessions")
    parser.add_argument("--every-cache", type=int, default=300, help="largest number with every cache live")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--device-mib", type=int, default=16, help="device budget")
    parser.add_argument("--host-mib", type=int, default=128, help="host budget")
    parser.add_argument("--opened", type=int, default=200, help="sessions opened under these budgets")
    parser.add_argument("--store-tokens", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--folder", help="where the store is measured, on the disk that matters")
    parser.add_argument("--repeats", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model, _ = load_model(options.model, dtype=dtype, device_map=options.device)
    results: dict[str, Any] = {
        "environment": environment(processes=1),
        "weights": identity_of(model).weights,
        "settings": {
            key: value for key, value in vars(options).items() if key not in ("model", "out", "folder")
        },
    }
    results["by_count"] = by_count(model, options.counts, options.tokens, options.every_cache)
    results["by_budget"] = by_budget(
        model, options.lengths, options.device_mib << 20, options.host_mib << 20, options.opened
    )
    results["by_size"] = by_size(model, options.lengths, options.repeats)
    results["store"] = []
    for tokens in options.store_tokens:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            results["store"].append(measure(Path(folder), 32, tokens, 5))
            print(results["store"][-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
