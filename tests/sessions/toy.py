"""A session of numpy arrays that needs every one of its buffers: the next step depends on all of them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable

import numpy as np

from statebridge.sessions import Buffer, BufferKind


class Toy:
    """Grows a cache by one entry a step, updates a recurrent vector, draws from a generator of its own."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.cache = np.zeros((2, 0, 3), np.float32)  # [H, T, D], grows along its middle axis
        self.memory = self.random.standard_normal(5)
        self.tokens = np.zeros(0, np.int64)
        self.clock = 7  # not a length

    def step(self, times: int = 1) -> Toy:
        for _ in range(times):
            drawn = self.random.standard_normal((2, 1, 3)).astype(np.float32)
            self.cache = np.concatenate((self.cache, drawn + self.memory[0].astype(np.float32)), axis=1)
            self.memory = np.tanh(self.memory + self.cache.sum() + self.clock)
            self.tokens = np.append(self.tokens, self.random.integers(1000))
            self.clock += 3
        return self

    def buffers(self) -> Iterable[Buffer]:
        yield Buffer.of("layer.0.cache", BufferKind.KV, self.cache, grows=1)
        yield Buffer.of("memory", BufferKind.RECURRENT, self.memory)
        yield Buffer.of("tokens", BufferKind.TOKENS, self.tokens, grows=0)
        yield Buffer.of("clock", BufferKind.CLOCK, self.clock)
        yield Buffer.json("random", BufferKind.RANDOM, self.random.bit_generator.state)

    def load(self, buffers: Iterable[Buffer]) -> None:
        named = {buffer.name: buffer for buffer in buffers}
        self.cache = named["layer.0.cache"].array().copy()
        self.memory = named["memory"].array().copy()
        self.tokens = named["tokens"].array().copy()
        self.clock = int(named["clock"].array())
        self.random.bit_generator.state = named["random"].value()

    def copy(self) -> Toy:
        return copy.deepcopy(self)


def digest(buffers: Iterable[Buffer]) -> str:
    """sha256 over names, facts and bytes, whatever the order."""
    sha = hashlib.sha256()
    for buffer in sorted(buffers, key=lambda b: b.name):
        sha.update(repr(buffer.spec).encode() + buffer.data.tobytes())
    return sha.hexdigest()
