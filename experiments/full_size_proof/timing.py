"""Time on a device, and random numbers that every run draws alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Log = Callable[[str], None]


class Stopwatch:
    """Seconds by name, each from an idle device to an idle device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, dict[str, float]()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time of the block to those of its name."""
        self._sync()
        start = time.perf_counter()
        yield
        self._sync()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def seeded(seed: int) -> torch.Generator:
    """A generator on the CPU."""
    return torch.Generator().manual_seed(seed)
