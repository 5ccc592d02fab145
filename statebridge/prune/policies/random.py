"""Random: every token of a chunk has the same chance. The control for any claim about scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from statebridge.prune.policy import ChunkRecord, ScoredPolicy


@dataclass(frozen=True)
class Random(ScoredPolicy):
    """Keep tokens by uniform numbers in [0, 1); a threshold of p drops each with chance p."""

    name: ClassVar[str] = "random"

    def score(self, record: ChunkRecord) -> Tensor:
        """Return uniform scores [B, N], the same for one seed and chunk."""
        return torch.rand(
            record.final.shape[:2],
            generator=record.generator,
            device=record.final.device,
            dtype=torch.float32,
        )
