"""What all three runtimes of the world model share: where the camera is, and how a world goes on.

A session walks one world: `observe` reads frames that were seen, `step` makes the next chunk from actions. The
camera's pose is integrated from the actions (dead reckoning) or from the true moves that a world gives, where
something stood in the way. Whatever a continuation needs is a buffer (`memory`). What a runtime remembers of past
chunks is its subclass's business.

Knows the model. Sessions of one device and one number of threads are exact to the bit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch

from statebridge.errors import ConfigError
from statebridge.worlds.cache import HistoryCache
from statebridge.worlds.conditioning import Conditioning
from statebridge.worlds.motion import TURN, integrated, steps_of, turns_of
from statebridge.worlds.runtimes.form import checked_actions, checked_frames, checked_moves
from statebridge.worlds.runtimes.memory import WorldMemory

Tensor = torch.Tensor


class WorldSession(WorldMemory):
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

        Raises
        ------
        ConfigError
            When these are no frames, actions or moves for whole chunks; nothing has changed then.
        """
        given, F = list(actions), self.model.config.grid.frames
        if len(frames) != len(given) or not given or len(given) % F:
            raise ConfigError(
                f"{len(frames)} frames and {len(given)} actions are no chunks of {F} frames each."
            )
        checked_frames(frames, len(given), self.model.config.camera.size)
        checked_actions(given, len(given))
        if moves is not None:
            checked_moves(moves, len(given))
        self.sound = False
        for start in range(0, len(given), F):
            part = slice(start, start + F)
            conditioning = self._conditioning(given[part], None if moves is None else moves[part])
            self._settle(frames[part][None].to(self.model.device), conditioning, self._history(conditioning))
        self.sound = True

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
            When there is not one action, or not one move, a frame.
        """
        conditioning = self._conditioning(list(actions), moves)
        history = self._history(conditioning)
        self.sound = False
        read = history.read(self.model.config.rotary)
        frames = self.sampler.sample(self.model, conditioning, read, self.generator).final
        self._settle(frames, conditioning, history)
        self.sound = True
        return frames[0].cpu()

    def after(self, actions: Iterable[int], moves: Tensor | None = None) -> int:
        """Bytes that will be held after `step` with these arguments."""
        self._conditioning(list(actions), moves)
        return self.nbytes() + self._growth()

    @abstractmethod
    def _growth(self) -> int:
        """Bytes by which the next chunk will add to what is held."""

    def _conditioning(self, actions: list[int], moves: Tensor | None) -> Conditioning:
        F = self.model.config.grid.frames
        taken = checked_actions(actions, F)
        if moves is None:
            steps, turns = steps_of(taken).double(), turns_of(taken).double() * TURN
            moves = torch.stack([steps, torch.zeros_like(steps), turns], dim=1)
        poses = integrated(self.pose, checked_moves(moves, F))
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
