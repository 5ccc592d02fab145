"""What a stage cost: wall time, tokens of each model, peak memory of device and host, bytes on disk.

Tokens are counted at the embeddings, through which every token must pass. Several processes: tokens are summed,
memory is that of the largest, time is that of this process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass
class Cost:
    """What a stage cost.

    Attributes
    ----------
    seconds
        Wall time.
    source_tokens, receiver_tokens
        Tokens that each model read, all rows and processes.
    device_bytes
        Most device memory that was allocated at once, on the fullest device; 0 without an accelerator.
    host_bytes
        Largest resident set of a process.
    disk_bytes
        Bytes of the stage's folder when it was largest, which is before scratch files are removed.
    """

    seconds: float = 0.0
    source_tokens: int = 0
    receiver_tokens: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens of both models per second of the stage."""
        return (self.source_tokens + self.receiver_tokens) / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All figures as plain data."""
        return dataclasses.asdict(self) | {"tokens_per_second": round(self.tokens_per_second, 3)}


@contextlib.contextmanager
def measured(pair: Any) -> Iterator[Cost]:
    """Measure what happens inside the `with` block; the figures are there after it."""
    from accelerate.utils import gather_object

    cost = Cost()
    # not through the pair's attributes: asking a pair that takes turns for a model would move it
    ends = {} if pair is None else {name: vars(pair)[name] for name in ("source", "receiver")}
    handles = [_counted(model, cost, f"{name}_tokens") for name, model in ends.items()]
    _reset_peaks()
    started = time.monotonic()
    try:
        yield cost
    finally:
        cost.seconds = time.monotonic() - started
        for handle in handles:
            handle.remove()
    cost.device_bytes, cost.host_bytes = _device_peak(), _host_peak()
    counts = (cost.source_tokens, cost.receiver_tokens, cost.device_bytes, cost.host_bytes)
    sources, receivers, devices, hosts = zip(*gather_object([counts]), strict=True)
    cost.source_tokens, cost.receiver_tokens = sum(sources), sum(receivers)
    cost.device_bytes, cost.host_bytes = max(devices), max(hosts)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _counted(model: Any, cost: Cost, name: str) -> Any:
    def see(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        setattr(cost, name, getattr(cost, name) + output.shape[0] * output.shape[1])

    return model.get_input_embeddings().register_forward_hook(see)


def _reset_peaks() -> None:
    for number in range(torch.cuda.device_count()):
        torch.cuda.reset_peak_memory_stats(number)
    with contextlib.suppress(OSError):  # where it may not be reset, the peak is that of the process's life
        Path("/proc/self/clear_refs").write_text("5")


def _device_peak() -> int:
    return max((torch.cuda.max_memory_allocated(n) for n in range(torch.cuda.device_count())), default=0)


def _host_peak() -> int:
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:  # no such file outside of Linux
        return 0
    return 1024 * int(found[1]) if found else 0
