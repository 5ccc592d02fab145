"""What a hand-over costs at full size, beside the receiver's own prefill and beside a plain copy of the same bytes.

    python -m benchmarks.full_size --out runs/full_size                  # one GPU that holds both models
    python -m benchmarks.full_size --out runs/tiny --tiny                # the same script, seconds on a CPU
    python -m benchmarks.full_size --table runs/full_size/results.json --write docs/performance.md

Models have the published shapes and random weights, maps are random and near the identity: times and bytes do not
depend on the values. A stage's time is the median wall time of calls that end with a synchronised device; `host` is
the part of it after which Python was free again. "plain copy" clones the same tensors one by one, "flat copy" copies
one buffer of as many bytes, which is the floor of the memory. "hand-over" is what `ModelPair.handoff` does between
the source's cache and the receiver's, each tensor moved once; "three calls" captures, translates and restores, with a
state of its own after each.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.full_size_table import insert, tables
from experiments.full_size_proof.maps import random_bridges
from experiments.full_size_proof.models import random_pair
from statebridge.bridge import Bridge, ModelPair
from statebridge.capture import continue_from, prefill, restore
from statebridge.capture.model import backend_of, cache_keyword, cache_of
from statebridge.capture.walker import new_cache
from statebridge.state import HybridState


class Clock:
    """Median milliseconds of a call, on any device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __call__(self, function: Callable[[], Any], repeats: int) -> dict[str, float]:
        function()  # the first call compiles, tunes and allocates
        host, total = [], []
        for _ in range(repeats):
            self.sync()
            start = time.perf_counter()
            result = function()
            host.append(time.perf_counter() - start)
            self.sync()
            total.append(time.perf_counter() - start)
            del result
        return {
            "ms": 1e3 * statistics.median(total),
            "host_ms": 1e3 * statistics.median(host),
            "least_ms": 1e3 * min(total),
        }

    def peak(self, function: Callable[[], Any]) -> int:
        """Peak bytes of the device above what was in use; 0 where there is no device to ask."""
        if self.device.type != "cuda":
            return 0
        gc.collect()
        self.sync()
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        result = function()
        self.sync()
        del result
        return int(torch.cuda.max_memory_allocated(self.device) - before)


def read(model: Any, ids: torch.Tensor) -> Any:
    """The model's own prefill, without this library: its cache after `ids`."""
    cache = new_cache(model)
    output = model(input_ids=ids, use_cache=True, logits_to_keep=1, **{cache_keyword(model): cache})
    return cache_of(output)


def decoding(model: Any, cache: Any, token: torch.Tensor) -> Callable[[], Any]:
    """One step of the model after what `cache` holds, which grows."""
    return lambda: model(input_ids=token, use_cache=True, **{cache_keyword(model): cache})


def copies(state: HybridState, clock: Clock, repeats: int) -> dict[str, Any]:
    """A plain copy of the state's tensors, and of one buffer of as many bytes."""
    tensors = [tensor for layer in state.layers for _, tensor in layer.tensors()]
    size = sum(state.nbytes().values())
    flat, target = (torch.empty(size, dtype=torch.uint8, device=clock.device) for _ in range(2))
    return {
        "plain copy": clock(lambda: [tensor.clone() for tensor in tensors], repeats),
        "flat copy": clock(lambda: target.copy_(flat), repeats),
    }


def kernels(function: Callable[[], Any]) -> dict[str, Any]:
    """Kernels that a call launches, and the device time of the longest ones, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        function()
        torch.cuda.synchronize()
    device = [e for e in seen.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    longest = sorted(device, key=lambda e: -e.self_device_time_total)[:6]
    return {
        "launches": sum(e.count for e in device),
        "device_ms": sum(e.self_device_time_total for e in device) / 1e3,
        "longest": [[e.key[:80], e.count, round(e.self_device_time_total / 1e3, 4)] for e in longest],
    }


@torch.inference_mode()
def measure(
    pair: ModelPair, bridges: dict[str, Bridge], length: int, repeats: int, save: Callable[[Any], None]
) -> None:
    """All figures at one prefix length; `save` is called with what is known so far."""
    device = pair.receiver.device
    clock = Clock(device)
    ids = torch.randint(3, pair.source.config.vocab_size, (1, length + 1), generator=_seeded(length))
    prefix, fed = ids[:, :-1], ids[:, -1:]
    here = prefix.to(device)
    found: dict[str, Any] = {"stages": {}, "kernels": {}, "peak_over_state": {}}
    stages = found["stages"]
    slow = 3 if length > 8192 else 5
    stages["source prefill"] = clock(lambda: read(pair.source, here), slow)
    stages["receiver prefill"] = clock(lambda: read(pair.receiver, here), slow)
    save(found)
    live = prefill(pair.source, prefix)
    state = live.state()
    size = sum(state.nbytes().values())
    found["state_bytes"] = state.nbytes() | {"total": size}
    found["copies"] = copies(state, clock, repeats)
    stages["capture"] = clock(live.state, repeats)
    for plan, bridge in bridges.items():
        stages[f"translate {plan}"] = clock(lambda bridge=bridge: bridge(state), repeats)
        save(found)
    translated = bridges["TDD"](state)
    stages["install"] = clock(lambda: restore(translated, pair.receiver), repeats)
    stages["install and first token"] = clock(lambda: continue_from(pair.receiver, translated, fed), repeats)
    stages["decode step"] = clock(decoding(pair.receiver, read(pair.receiver, here), fed.to(device)), repeats)
    for plan, bridge in bridges.items():

        def hand_over(bridge: Bridge = bridge) -> Any:
            return restore(bridge(live.state(borrow=True)), pair.receiver, consume=True)

        def in_three_calls(bridge: Bridge = bridge) -> Any:
            return restore(bridge(live.state()), pair.receiver)

        stages[f"hand-over {plan}"] = clock(hand_over, repeats)
        stages[f"three calls {plan}"] = clock(in_three_calls, repeats)
        if device.type == "cuda":
            for name, call in (("hand-over", hand_over), ("three calls", in_three_calls)):
                found["peak_over_state"][f"{name} {plan}"] = clock.peak(call) / size
            if length <= 4096:
                found["kernels"][f"translate {plan}"] = kernels(lambda bridge=bridge: bridge(state))
        save(found)
    if device.type == "cuda" and length <= 4096:
        found["kernels"]["capture"] = kernels(live.state)
        found["kernels"]["install"] = kernels(lambda: restore(translated, pair.receiver))
    save(found)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def environment(model: Any) -> dict[str, Any]:
    """What the figures depend on."""
    cuda = model.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(model.device) if cuda else "CPU",
        "device_bytes": torch.cuda.get_device_properties(model.device).total_memory if cuda else 0,
        "threads": torch.get_num_threads(),
        "backend": dict(backend_of(model)),
    }


def main() -> None:
    """Measure, or print the tables of a finished measurement."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="Folder for results.json.")
    parser.add_argument("--table", type=Path, help="Print the tables of a results.json and measure nothing.")
    parser.add_argument("--write", type=Path, help="With --table: put them between the marks of this page.")
    parser.add_argument("--tiny", action="store_true", help="Tiny models and lengths, for a CPU.")
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device")
    options = parser.parse_args()
    if options.table:
        made = tables(json.loads(options.table.read_text(encoding="utf-8")))
        if options.write:
            insert(options.write, made)
        else:
            print(made)
        return
    if options.out is None:
        parser.error("give --out, or --table")
    device = torch.device(options.device or ("cpu" if options.tiny else "cuda"))
    lengths = options.lengths or ([64, 256] if options.tiny else [4096, 16384, 65536])
    started = time.monotonic()

    def log(text: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {text}", flush=True)

    log(f"building both models on {device}")
    pair = random_pair(options.tiny, str(device), str(device))
    names = [model.config._name_or_path or "tiny" for model in (pair.source, pair.receiver)]
    bridges = random_bridges(pair)
    results: dict[str, Any] = {"environment": environment(pair.receiver), "models": names, "lengths": {}}
    options.out.mkdir(parents=True, exist_ok=True)
    for length in lengths:

        def save(found: Any, length: int = length) -> None:
            results["lengths"][str(length)] = found
            text = json.dumps(results, indent=1)
            (options.out / "results.json").write_text(text, encoding="utf-8")
            last = list(found["stages"])[-1]
            log(f"{length} tokens: {last} {found['stages'][last]['ms']:.3f} ms")

        measure(pair, bridges, length, options.repeats, save)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(tables(results))


if __name__ == "__main__":
    main()
