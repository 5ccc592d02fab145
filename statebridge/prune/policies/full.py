"""Full KV: nothing is pruned. The reference that every other policy is measured against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from statebridge.prune.policy import ChunkRecord, Policy


@dataclass(frozen=True)
class Full(Policy):
    """Keep every token of every chunk; sink and window change nothing."""

    name: ClassVar[str] = "full"

    def score(self, record: ChunkRecord) -> Tensor:
        """Return equal scores [B, N]."""
        return record.final.new_ones(record.final.shape[:2], dtype=torch.float32)

    def keep(self, scores: Tensor) -> Sequence[Tensor | None]:
        """Keep everything."""
        return (None,)
