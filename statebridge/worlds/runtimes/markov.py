"""The Markov runtime: the latest chunk is all that the next one sees.

state = last frames + their actions, poses, times + camera + clock + random state        (flat)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from statebridge.sessions.session import BufferKind
from statebridge.worlds.cache import HistoryCache
from statebridge.worlds.conditioning import Conditioning
from statebridge.worlds.rollout import reread
from statebridge.worlds.runtimes.memory import Held
from statebridge.worlds.runtimes.session import WorldSession

Tensor = torch.Tensor


class MarkovSession(WorldSession):
    """A world that is forgotten chunk by chunk."""

    holds: ClassVar[Mapping[str, Held]] = {
        "last.frames": Held(BufferKind.LATENT),
        "last.actions": Held(BufferKind.WINDOW),
        "last.poses": Held(BufferKind.WINDOW),
        "last.times": Held(BufferKind.WINDOW),
    }

    def _nothing(self) -> dict[str, Tensor]:
        return chunks_of_nothing("last", self.model.config.camera.size)

    def _history(self, conditioning: Conditioning) -> HistoryCache:
        if not self.chunk:
            return self.model.empty_cache()
        before = conditioning_of(self.tensors, "last", self.model.device)
        return reread(
            self.model, self.tensors["last.frames"][None].to(self.model.device), before, [self.chunk - 1]
        )

    def _remember(
        self, frames: Tensor, conditioning: Conditioning, history: HistoryCache
    ) -> dict[str, Tensor]:
        return named_chunk("last", frames, conditioning)

    def _growth(self) -> int:
        """Nothing, once there is a first chunk."""
        F, size = self.model.config.grid.frames, self.model.config.camera.size
        return 0 if self.chunk else chunk_bytes(F, size)


def chunks_of_nothing(prefix: str, size: int) -> dict[str, Tensor]:
    """Frames [0, 3, size, size], actions [0], poses [0, 3] and times [0] under a prefix."""
    return {
        f"{prefix}.frames": torch.empty(0, 3, size, size),
        f"{prefix}.actions": torch.empty(0, dtype=torch.int64),
        f"{prefix}.poses": torch.empty(0, 3),
        f"{prefix}.times": torch.empty(0),
    }


def named_chunk(prefix: str, frames: Tensor, conditioning: Conditioning) -> dict[str, Tensor]:
    """A chunk [1, F, ...] as tensors under a prefix, one entry a frame; the frames may still be the caller's."""
    return {
        f"{prefix}.frames": frames[0].clone(),
        f"{prefix}.actions": conditioning.actions[0],
        f"{prefix}.poses": conditioning.poses[0],
        f"{prefix}.times": conditioning.times[0],
    }


def conditioning_of(tensors: Mapping[str, Tensor], prefix: str, device: torch.device) -> Conditioning:
    """The conditioning of the frames under a prefix, with a batch of one."""
    names = ("actions", "poses", "times")
    return Conditioning(*(tensors[f"{prefix}.{name}"][None].to(device) for name in names))


def chunk_bytes(frames: int, size: int) -> int:
    """Bytes of a chunk's frames, actions, poses and times."""
    return frames * (3 * size * size * 4 + 8 + 3 * 4 + 4)
