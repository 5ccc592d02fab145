"""The memory-bank runtime: every chunk is kept, and the ones that saw most of the coming view are read again.

    score(chunk) = mean over wanted frames of max over its frames of overlap  -  penalty * age in chunks
    state = all frames, actions, poses, times + camera + clock + random state           (grows)

The latest chunk is always read. Keys are not state: they are written anew for every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from statebridge.errors import ConfigError
from statebridge.sessions.session import BufferKind
from statebridge.worlds.cache import HistoryCache
from statebridge.worlds.conditioning import Conditioning
from statebridge.worlds.model import WorldModel
from statebridge.worlds.rollout import reread
from statebridge.worlds.runtimes.markov import chunk_bytes, chunks_of_nothing, conditioning_of, named_chunk
from statebridge.worlds.runtimes.memory import Held
from statebridge.worlds.runtimes.overlap import view_overlap
from statebridge.worlds.runtimes.session import WorldSession
from statebridge.worlds.sampler import Sampler

Tensor = torch.Tensor


class BankSession(WorldSession):
    """A world that is looked up.

    Parameters
    ----------
    model, sampler, seed
        As in `WorldSession`.
    retrieve
        Chunks that are read for a step, the latest one included.
    penalty
        What a chunk of age loses against the overlap, which is at most 1.

    Raises
    ------
    ConfigError
        When nothing would be retrieved.
    """

    holds: ClassVar[Mapping[str, Held]] = {
        "bank.frames": Held(BufferKind.LATENT, 0),
        "bank.actions": Held(BufferKind.RETRIEVAL, 0),
        "bank.poses": Held(BufferKind.RETRIEVAL, 0),
        "bank.times": Held(BufferKind.RETRIEVAL, 0),
    }

    def __init__(
        self,
        model: WorldModel,
        sampler: Sampler | None = None,
        seed: int = 0,
        *,
        retrieve: int = 4,
        penalty: float = 0.002,
    ) -> None:
        if retrieve < 1:
            raise ConfigError(f"A bank that retrieves {retrieve} chunks shows nothing; retrieve at least 1.")
        self.retrieve, self.penalty = retrieve, penalty
        super().__init__(model, sampler, seed)

    def retrieved(self, conditioning: Conditioning) -> list[int]:
        """Numbers of the chunks that are read for the frames of this conditioning, oldest first."""
        F, device = self.model.config.grid.frames, self.model.device
        poses = self.tensors["bank.poses"].to(device)
        overlap = view_overlap(conditioning.poses[0], poses, self.model.config.camera.fov)  # [F, frames]
        score = overlap.view(F, -1, F).amax(2).mean(0)  # [chunks]
        age = torch.arange(len(score) - 1, -1, -1, device=device)
        score = score - self.penalty * age
        score[-1] = torch.inf
        order = score.argsort(descending=True, stable=True)
        return sorted(order[: self.retrieve].tolist())

    def _nothing(self) -> dict[str, Tensor]:
        return chunks_of_nothing("bank", self.model.config.camera.size)

    def _history(self, conditioning: Conditioning) -> HistoryCache:
        if not len(self.tensors["bank.frames"]):
            return self.model.empty_cache()
        F, device = self.model.config.grid.frames, self.model.device
        numbers = self.retrieved(conditioning)
        index = (torch.tensor(numbers)[:, None] * F + torch.arange(F)).flatten()
        picked = {name: tensor[index.to(tensor.device)] for name, tensor in self.tensors.items()}
        before = conditioning_of(picked, "bank", device)
        return reread(self.model, picked["bank.frames"][None].to(device), before, numbers)

    def _remember(
        self, frames: Tensor, conditioning: Conditioning, history: HistoryCache
    ) -> dict[str, Tensor]:
        new = named_chunk("bank", frames, conditioning)
        return {name: torch.cat([old, new[name].to(old.device)]) for name, old in self.tensors.items()}

    def _growth(self) -> int:
        return chunk_bytes(self.model.config.grid.frames, self.model.config.camera.size)

    def _settings(self) -> dict[str, Any]:
        return super()._settings() | {"retrieve": self.retrieve, "penalty": self.penalty}
