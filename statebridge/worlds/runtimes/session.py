"""What all three runtimes of the world model share: where the camera is, clocks, random state, named tensors.

A session walks one world: `observe` reads frames that were seen, `step` makes the next chunk from actions. The
camera's pose is integrated from the actions (dead reckoning) or from the true moves that a world gives, where
something stood in the way. Whatever a continuation needs is a buffer: tensors by name, the pose, the clock, and
the generator that noise is drawn from. What a runtime remembers of past chunks is its subclass's business.

Knows the model and the session interface. Sessions of one device and one number of threads are exact to the bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from statebridge.errors import ConfigError, StateMismatch, StoreError
from statebridge.sessions.adapters import buffer_tensor, tensor_buffer
from statebridge.sessions.session import Buffer, BufferKind
from statebridge.worlds.cache import HistoryCache
from statebridge.worlds.conditioning import Conditioning
from statebridge.worlds.model import WorldModel
from statebridge.worlds.motion import TURN, integrated, steps_of, turns_of
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


class WorldSession(ABC):
    """A walk through one imagined world.

    Parameters
    ----------
    model
        The denoiser; shared by any number of sessions.
    sampler
        Stochastic by default, so that the random state matters at every step.
    seed
        Of the session's noise.

    Attributes
    ----------
    pose
        Camera relative to where the session began, float64 [3]: x, y, yaw.
    chunk, time
        Number of the next chunk, and time of its first frame.
    generator
        On the CPU, so that noise is the same for a model on any device.
    tensors
        What is remembered, by name.
    sound
        False while a chunk is being made: what failed in between must not be saved.
    """

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

    @abstractmethod
    def _nothing(self) -> dict[str, Tensor]:
        """The tensors of a session that has seen nothing, on the CPU."""

    @abstractmethod
    def _history(self, conditioning: Conditioning) -> HistoryCache:
        """What the model may look at while it makes the chunk that the conditioning describes."""

    @abstractmethod
    def _remember(
        self, frames: Tensor, conditioning: Conditioning, history: HistoryCache
    ) -> dict[str, Tensor]:
        """All tensors after a clean chunk [1, F, 3, size, size] that was made, or observed, with this history."""

    def observe(self, frames: Tensor, actions: Iterable[int], moves: Tensor | None = None) -> None:
        """Read frames that were seen.

        Parameters
        ----------
        frames
            float32 [chunks * F, 3, size, size] in [-1, 1].
        actions, moves
            As in `step`, for all frames; the first frame of a session is where it begins, and its action is to
            stay.
        """
        given, F = list(actions), self.model.config.grid.frames
        if len(frames) != len(given) or not given or len(given) % F:
            raise ConfigError(
                f"{len(frames)} frames and {len(given)} actions are no chunks of {F} frames each."
            )
        for start in range(0, len(given), F):
            part = slice(start, start + F)
            conditioning = self._conditioning(given[part], None if moves is None else moves[part])
            self._settle(frames[part][None].to(self.model.device), conditioning, self._history(conditioning))

    @torch.no_grad()
    def step(self, actions: Iterable[int], moves: Tensor | None = None) -> Tensor:
        """Make the next chunk.

        Parameters
        ----------
        actions
            One a frame (see `statebridge.worlds.motion`).
        moves
            True moves of the camera, one a frame, in its own frame: forward, to the left, turn; float64 [F, 3].
            None takes the actions at their word.

        Returns
        -------
        frames
            float32 [F, 3, size, size] in [-1, 1], on the CPU.

        Raises
        ------
        ConfigError
            When there is not one action a frame.
        """
        conditioning = self._conditioning(list(actions), moves)
        history = self._history(conditioning)
        self.sound = False
        read = history.read(self.model.config.rotary)
        frames = self.sampler.sample(self.model, conditioning, read, self.generator).final
        self._settle(frames, conditioning, history)
        self.sound = True
        return frames[0].cpu()

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
            tensors = self._completed(fresh, set(named), chunk)
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
        """Bytes of all that is remembered, wherever it is."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def after(self, actions: Iterable[int], moves: Tensor | None = None) -> int:
        """Bytes that will be held after `step` with these arguments."""
        self._conditioning(list(actions), moves)
        return self.nbytes() + self._growth()

    @abstractmethod
    def _growth(self) -> int:
        """Bytes by which the next chunk will add to what is held."""

    def _completed(self, tensors: dict[str, Tensor], given: set[str], chunk: int) -> dict[str, Tensor]:
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

    def _conditioning(self, actions: list[int], moves: Tensor | None) -> Conditioning:
        F = self.model.config.grid.frames
        if len(actions) != F or not all(0 <= action < 5 for action in actions):
            raise ConfigError(f"{actions} are not {F} actions from 0 to 4; give one a frame.")
        taken = torch.tensor(actions)
        if moves is None:
            steps, turns = steps_of(taken).double(), turns_of(taken).double() * TURN
            moves = torch.stack([steps, torch.zeros_like(steps), turns], dim=1)
        poses = integrated(self.pose, moves)
        times = self.time + torch.arange(F, dtype=torch.float32)
        device = self.model.device
        return Conditioning(taken[None].to(device), poses.float()[None].to(device), times[None].to(device))

    @torch.no_grad()
    def _settle(self, frames: Tensor, conditioning: Conditioning, history: HistoryCache) -> None:
        """Take a clean chunk in, and move the clock and the camera on."""
        tensors = self._remember(frames, conditioning, history)
        self.tensors = tensors
        self.pose = conditioning.poses[0, -1].double().cpu()
        self.chunk += 1
        self.time = float(conditioning.times[0, -1]) + 1.0
