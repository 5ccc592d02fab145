"""Checkpoint and restore against a plain copy and a plain write of the same bytes.

    python benchmarks/sessions.py FOLDER --tokens 4096

The session has the shapes of a hybrid model's state (keys and values of every fourth layer in bfloat16, recurrent
matrices in float32, convolution history), filled with random bytes. Baselines work on the same bytes: a copy in
memory, one file written and synced, one file read, their sha256 on one core. All figures of one line come from one
run on one machine; the ratios mean something, the seconds do not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from statebridge.sessions import Buffer, BufferKind, BufferSpec, SessionStore


class Shapes:
    """A session of random bytes that can append tokens."""

    def __init__(self, layers: int, tokens: int) -> None:
        self.random = np.random.default_rng(0)
        self.layers = layers
        self.parts: dict[str, tuple[BufferSpec, np.ndarray]] = {}
        for layer in range(layers):
            if layer % 4 == 3:
                for name in ("key", "value"):
                    self.put(f"layers.{layer}.{name}", BufferKind.KV, "bfloat16", (1, 4, tokens, 256), 2)
            else:
                self.put(f"layers.{layer}.conv_state", BufferKind.WINDOW, "bfloat16", (1, 8192, 4))
        self.update()

    def put(
        self, name: str, kind: BufferKind, dtype: str, shape: tuple[int, ...], grows: int | None = None
    ) -> None:
        spec = BufferSpec(name, kind, dtype, shape, grows)
        self.parts[name] = (spec, np.frombuffer(self.random.bytes(spec.nbytes), np.uint8))

    def update(self) -> None:
        for layer in range(self.layers):
            if layer % 4 != 3:
                self.put(
                    f"layers.{layer}.recurrent_state", BufferKind.RECURRENT, "float32", (1, 32, 128, 128)
                )

    def append(self, tokens: int) -> None:
        for name, (spec, data) in list(self.parts.items()):
            if spec.grows is None:
                continue
            heads, old, width = spec.shape[1:]
            grown = np.empty((heads, old + tokens, width * 2), np.uint8)
            grown[:, :old] = data.reshape(heads, old, width * 2)
            grown[:, old:] = self.random.integers(0, 256, (heads, tokens, width * 2), np.uint8)
            new = BufferSpec(name, spec.kind, spec.dtype, (1, heads, old + tokens, width), 2)
            self.parts[name] = (new, grown.reshape(-1))
        self.update()

    def buffers(self) -> Iterable[Buffer]:
        return (Buffer(spec, data) for spec, data in self.parts.values())

    def load(self, buffers: Iterable[Buffer]) -> None:
        self.parts = {buffer.name: (buffer.spec, buffer.data) for buffer in buffers}


def timed(function: Callable[[], Any], repeats: int) -> float:
    """Median seconds."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(folder: Path, layers: int, tokens: int, repeats: int) -> dict[str, Any]:
    """All figures for one size of state."""
    session = Shapes(layers, tokens)
    datas = [data for _, data in session.parts.values()]
    nbytes = sum(data.nbytes for data in datas)
    plain = folder / "plain"

    def write() -> None:
        with plain.open("wb") as file:
            for data in datas:
                file.write(data.data)
            file.flush()
            os.fsync(file.fileno())

    def first() -> None:
        shutil.rmtree(folder / "store", ignore_errors=True)
        SessionStore(folder / "store").checkpoint(session)

    def digest() -> None:
        for data in datas:
            hashlib.sha256(data.data).digest()

    copy = timed(lambda: [data.copy() for data in datas], repeats)
    written = timed(write, repeats)
    read = timed(plain.read_bytes, repeats)
    hashed = timed(digest, repeats)
    fresh = timed(first, repeats)
    store = SessionStore(folder / "store")
    latest = [store.checkpoint(session)]
    restored = timed(lambda: store.restore(latest[-1]), repeats)
    later = []
    for _ in range(repeats):
        session.append(64)
        start = time.perf_counter()
        latest.append(store.checkpoint(session, parent=latest[-1]))
        later.append(time.perf_counter() - start)
    own = store.list()[-1].own_nbytes
    forked = timed(lambda: store.fork(latest[-1]), repeats)
    return {
        "tokens": tokens,
        "state_MiB": round(nbytes / 2**20, 1),
        "checkpoint_over_synced_write": round(fresh / written, 2),
        "checkpoint_over_copy": round(fresh / copy, 1),
        "checkpoint_over_sha256": round(fresh / hashed, 2),
        "64_tokens_later_over_synced_write": round(statistics.median(later) / written, 2),
        "64_tokens_later_own_bytes_share": round(own / nbytes, 3),
        "restore_over_read": round(restored / read, 2),
        "restore_over_copy": round(restored / copy, 1),
        "restore_over_sha256": round(restored / hashed, 2),
        "fork_over_synced_write": round(forked / written, 4),
        "checkpoint_MiB_per_s": round(nbytes / 2**20 / fresh),
        "restore_MiB_per_s": round(nbytes / 2**20 / restored),
    }


def main() -> None:
    """Measure at every length and print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="where to write, on the disk that is to be measured")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for tokens in options.tokens:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            print(json.dumps(measure(Path(folder), options.layers, tokens, options.repeats)), flush=True)


if __name__ == "__main__":
    main()
