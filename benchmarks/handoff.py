"""Time to the receiver's first token, by hand-over and by re-reading, and the memory of a hand-over.

    python benchmarks/handoff.py checkpoints/source checkpoints/receiver checkpoints/bridge

All figures of one line come from one run on one machine, so their ratios mean something and the seconds do not.
Memory is the peak above what was in use before the hand-over: on CUDA the allocator's, elsewhere the resident set,
sampled five times a millisecond.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from statebridge.bridge import Bridge, ModelPair
from statebridge.capture import continue_from, prefill
from statebridge.evaluate.demo import installed_documents


class PeakMemory:
    """Peak bytes above the start, while the `with` block runs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak = 0

    def __enter__(self) -> PeakMemory:
        if self.device.type != "cuda" and sys.platform == "linux":
            # freed memory that the allocator keeps would be used again unseen
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.start = self._now()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            self.running = True
            self.thread = threading.Thread(target=self._watch)
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self.device) - self.start
        else:
            self.running = False
            self.thread.join()

    def _watch(self) -> None:
        while self.running:
            self.peak = max(self.peak, self._now() - self.start)
            time.sleep(0.0002)

    def _now(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096


def timed(function: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """Median seconds of `function`, after one call that is not counted."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


@torch.inference_mode()
def measure(pair: ModelPair, bridge: Bridge, ids: torch.Tensor, repeats: int) -> dict[str, Any]:
    """All figures for one prefix [1, L + 1]; the last token is the bridge token."""
    prefix, fed = ids[:, :-1], ids[:, -1:]
    device = next(pair.receiver.parameters()).device
    live = prefill(pair.source, prefix)
    state = live.state()
    translated = bridge(state)

    def hand_over() -> None:
        continue_from(pair.receiver, bridge(live.state()), fed)

    def reread() -> None:
        continue_from(pair.receiver, prefill(pair.receiver, prefix), fed)

    parts = {
        "capture": timed(live.state, repeats, device),
        "translate": timed(lambda: bridge(state), repeats, device),
        "first_token": timed(lambda: continue_from(pair.receiver, translated, fed), repeats, device),
        "hand_over": timed(hand_over, repeats, device),
        "reread": timed(reread, max(repeats // 2, 1), device),
    }
    with PeakMemory(device) as memory:
        hand_over()
    size = sum(state.nbytes().values())
    return {
        "prefix_tokens": prefix.shape[1],
        "ratio": parts["reread"] / parts["hand_over"],
        "share_of_reading": {name: value / parts["reread"] for name, value in parts.items()},
        "state_bytes": size,
        "peak_bytes_over_state_bytes": memory.peak / size,
    }


def main() -> None:
    """Measure at every length and print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("receiver")
    parser.add_argument("bridge")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    pair = ModelPair.from_pretrained(
        options.source, options.receiver, dtype=options.dtype, device_map=options.device
    )
    bridge = Bridge.from_pretrained(options.bridge)
    text = "\n\n".join(document.text for document in installed_documents())
    ids = torch.tensor([pair.tokenizer(text, add_special_tokens=False)["input_ids"]])
    for length in options.lengths:
        print(json.dumps(measure(pair, bridge, ids[:, : length + 1], options.repeats)), flush=True)


if __name__ == "__main__":
    main()
