"""What a world session holds, as buffers and back: tensors by name, the pose, the clocks, the random state.

Buffers are checked as a whole before anything of them is taken, and the random state is taken last. Knows the session
interface, and of the model its identity and its device; how a world goes on is not known here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from statebridge.errors import StateMismatch, StoreError
from statebridge.sessions.adapters import buffer_tensor, tensor_buffer
from statebridge.sessions.session import Buffer, BufferKind
from statebridge.worlds.model import WorldModel
from statebridge.worlds.runtimes.form import require_form
from statebridge.worlds.sampler import Sampler

Tensor = torch.Tensor


@dataclass(frozen=True)
class Held:
    """How a named tensor of a runtime is stored.

    Attributes
    ----------
    kind
        What it is.
    grows
        Axis along which it only ever grows.
    """

    kind: BufferKind
    grows: int | None = None


class WorldMemory(ABC):
    """What a world session holds; see `statebridge.worlds.runtimes.WorldSession`."""

    holds: ClassVar[Mapping[str, Held]]
    """Every tensor that the runtime remembers; a name that ends in `*` stands for one of each layer."""

    def __init__(self, model: WorldModel, sampler: Sampler | None = None, seed: int = 0) -> None:
        self.model = model
        self.sampler = sampler or Sampler(stochastic=True)
        self.generator = torch.Generator().manual_seed(seed)
        self.pose = torch.zeros(3, dtype=torch.float64)
        self.chunk, self.time = 0, 0.0
        self.tensors: dict[str, Tensor] = self._nothing()
        self.sound = True

    def buffers(self) -> Iterator[Buffer]:
        """Every buffer that a continuation needs."""
        yield Buffer.json("settings", BufferKind.SETTINGS, self._settings())
        yield tensor_buffer("pose", BufferKind.CLOCK, self.pose)
        yield Buffer.of("clock.chunk", BufferKind.CLOCK, self.chunk)
        yield Buffer.of("clock.time", BufferKind.CLOCK, self.time)
        for name, tensor in self.tensors.items():
            held = self._held(name)
            yield tensor_buffer(name, held.kind, tensor, grows=held.grows, **self._derivable(name))
        yield tensor_buffer("random", BufferKind.RANDOM, self.generator.get_state())

    def load(self, buffers: Iterable[Buffer]) -> None:
        """Become the session that gave these buffers; what is missing is as in a new session, or derived.

        Raises
        ------
        StateMismatch
            When they come from another model or another kind of runtime.
        StoreError
            When a buffer is unknown, does not hold what its name says, or is missing and cannot be derived.
        """
        named = {buffer.name: buffer for buffer in buffers}
        known = {"settings", "pose", "clock.chunk", "clock.time", "random", *self._nothing()}
        if unknown := set(named) - known:
            raise StoreError(
                f"The buffer {min(unknown)} is not one of a {type(self).__name__}; load it elsewhere."
            )
        if "settings" in named:
            self._require(named["settings"].value())
        try:
            fresh = self._nothing() | {n: buffer_tensor(b) for n, b in named.items() if n in self._nothing()}
            pose = buffer_tensor(named["pose"]) if "pose" in named else torch.zeros(3, dtype=torch.float64)
            chunk = int(named["clock.chunk"].array()) if "clock.chunk" in named else 0
            time = float(named["clock.time"].array()) if "clock.time" in named else 0.0
            if pose.shape != (3,) or pose.dtype != torch.float64 or not bool(pose.isfinite().all()):
                raise StoreError(
                    "The pose is not three finite numbers of float64; restore the session whole."
                )
            if chunk < 0 or not math.isfinite(time):
                raise StoreError(f"clock.chunk is {chunk} and clock.time {time}; restore the session whole.")
            require_form(fresh, self._nothing(), self.model.config.grid.frames)
            tensors = self._completed(fresh, set(named))
            if "random" in named:
                state = buffer_tensor(named["random"])
                torch.Generator().set_state(state)
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise StoreError(
                f"These buffers do not make a {type(self).__name__} ({error}); restore them whole."
            ) from error
        self.tensors, self.pose, self.chunk, self.time = tensors, pose, chunk, time
        self.sound = True
        if "random" in named:
            self.generator.set_state(state)

    def prepare(self) -> None:
        """Move what is remembered to the model's device."""
        self.tensors = {name: tensor.to(self.model.device) for name, tensor in self.tensors.items()}

    def release(self) -> None:
        """Move what is remembered to the CPU."""
        self.tensors = {name: tensor.cpu() for name, tensor in self.tensors.items()}

    def nbytes(self) -> int:
        """Bytes of all that is remembered, wherever it is, with the camera's pose and the random state."""
        tensors = [*self.tensors.values(), self.pose, self.generator.get_state()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @abstractmethod
    def _nothing(self) -> dict[str, Tensor]:
        """The tensors of a session that has seen nothing, on the CPU."""

    def _completed(self, tensors: dict[str, Tensor], given: set[str]) -> dict[str, Tensor]:
        """The tensors with what is missing derived, where the runtime can."""
        return tensors

    def _derivable(self, name: str) -> dict[str, Any]:
        """`derivable_from` and `cost` of a tensor's buffer."""
        return {}

    def _settings(self) -> dict[str, Any]:
        return {
            "runtime": type(self).__name__,
            "model": self.model.digest(),
            "sampler": list(self.sampler.sigmas),
            "stochastic": self.sampler.stochastic,
        }

    def _require(self, saved: Any) -> None:
        own = self._settings()
        if not isinstance(saved, dict):
            raise StoreError("The settings of these buffers are no mapping; restore them whole.")
        differs = {k: (own.get(k), saved.get(k)) for k in {*own, *saved} if own.get(k) != saved.get(k)}
        if differs:
            raise StateMismatch("these buffers belong to another runtime or model", differs)

    def _held(self, name: str) -> Held:
        return self.holds.get(name) or self.holds[f"{name.split('.')[0]}.*"]
