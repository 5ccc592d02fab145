"""Makes sessions of one model and one kind, for a runtime that moves many of them on and off the device.

SessionRuntime(WorldEngine(model, WindowedSession, window=8), store, device_budget=..., host_budget=...)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from statebridge.worlds.model import WorldModel
from statebridge.worlds.runtimes.session import WorldSession


class WorldEngine:
    """An engine of world sessions.

    Parameters
    ----------
    model
        Shared by all of them.
    kind
        `MarkovSession`, `BankSession` or `WindowedSession`.
    options
        Of each session: sampler, window, retrieve and so on.
    """

    def __init__(self, model: WorldModel, kind: type[WorldSession], **options: Any) -> None:
        self.model, self.kind, self.options = model, kind, options

    def fresh(
        self,
        *,
        seed: int = 0,
        frames: torch.Tensor | None = None,
        actions: Iterable[int] = (),
        moves: torch.Tensor | None = None,
    ) -> WorldSession:
        """A session off the device that has seen these frames; see `WorldSession.observe`."""
        session = self.kind(self.model, seed=seed, **self.options)
        if frames is not None:
            session.observe(frames, actions, moves)
            session.release()
        return session
