"""Streaming: the sink and the window, nothing between them.

Source: Xiao et al., "Efficient streaming language models with attention sinks", arXiv 2309.17453.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from statebridge.prune.policy import ChunkRecord, Policy


@dataclass(frozen=True)
class Streaming(Policy):
    """Keep nothing of a chunk that leaves the window."""

    name: ClassVar[str] = "streaming"

    def score(self, record: ChunkRecord) -> Tensor:
        """Return equal scores [B, N]."""
        return record.final.new_zeros(record.final.shape[:2], dtype=torch.float32)

    def keep(self, scores: Tensor) -> Sequence[Tensor | None]:
        """Keep nothing."""
        return (torch.zeros_like(scores, dtype=torch.bool),)
