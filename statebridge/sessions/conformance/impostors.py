"""Sessions that are not the one that left. A return test that accepts any of them tests nothing.

One small class each; anything with a name that maps a setting to buffers is an impostor too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from statebridge.errors import FingerprintError
from statebridge.sessions.adapters import buffer_tensor, tensor_buffer
from statebridge.sessions.conformance.setting import Setting
from statebridge.sessions.fingerprint.bench import Runtime
from statebridge.sessions.session import Buffer, BufferKind


class Impostor(Protocol):
    """Buffers that must not pass for the session's."""

    @property
    def name(self) -> str:
        """As the verdict lists it."""

    def __call__(self, setting: Setting[Runtime]) -> Iterable[Buffer]:
        """The buffers that are loaded instead."""


@dataclass(frozen=True)
class Foreign:
    """Another session's state."""

    name: str = "another session's state"

    def __call__(self, setting: Setting[Runtime]) -> Iterable[Buffer]:
        """The buffers that are loaded instead."""
        return setting.saved(setting.other)


@dataclass(frozen=True)
class Stale:
    """The session's own state from before it came to the anchor."""

    name: str = "a stale state"

    def __call__(self, setting: Setting[Runtime]) -> Iterable[Buffer]:
        """The buffers that are loaded instead."""
        return setting.saved(setting.earlier)


@dataclass(frozen=True)
class WrongRandom:
    """The right state with another session's random states; told apart only by a probe that draws."""

    name: str = "a wrong random state"

    def __call__(self, setting: Setting[Runtime]) -> Iterable[Buffer]:
        """The buffers that are loaded instead.

        Raises
        ------
        FingerprintError
            When the runtime has no random state.
        """
        right = setting.saved(setting.anchor)
        wrong = {b.name: b for b in setting.saved(setting.other) if b.spec.kind is BufferKind.RANDOM}
        if not wrong:
            raise FingerprintError("The runtime has no random state; leave WrongRandom out of the impostors.")
        return [wrong.get(buffer.name, buffer) for buffer in right]


@dataclass(frozen=True)
class Drifted:
    """The right state with noise on every floating-point buffer but random ones, as a poor translation leaves it.

    Attributes
    ----------
    scale
        Standard deviation of the noise in units of each buffer's own.
    seed
        Of the noise.
    """

    scale: float = 0.05
    seed: int = 0
    name: str = "a drifted state"

    def __call__(self, setting: Setting[Runtime]) -> Iterable[Buffer]:
        """The buffers that are loaded instead."""
        generator = torch.Generator().manual_seed(self.seed)
        return [self._noisy(buffer, generator) for buffer in setting.saved(setting.anchor)]

    def _noisy(self, buffer: Buffer, generator: torch.Generator) -> Buffer:
        tensor = buffer_tensor(buffer)
        if not tensor.is_floating_point() or buffer.spec.kind is BufferKind.RANDOM:
            return buffer
        wide = tensor.double()
        noise = torch.randn(wide.shape, dtype=torch.float64, generator=generator)
        moved = (wide + self.scale * wide.std(correction=0) * noise).to(tensor.dtype)
        return dataclasses.replace(buffer, data=tensor_buffer(buffer.name, buffer.spec.kind, moved).data)


@dataclass(frozen=True)
class Altered:
    """The right state after a function of the caller's, such as a wrong bridge.

    Attributes
    ----------
    name
        As the verdict lists it.
    alter
        Buffers to buffers.
    """

    name: str
    alter: Callable[[tuple[Buffer, ...]], Iterable[Buffer]]

    def __call__(self, setting: Setting[Runtime]) -> Iterable[Buffer]:
        """The buffers that are loaded instead."""
        return self.alter(setting.saved(setting.anchor))


IMPOSTORS: tuple[Impostor, ...] = (Foreign(), Stale(), WrongRandom(), Drifted())
