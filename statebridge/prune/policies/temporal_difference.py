"""Temporal difference: keep what changed since the frame before, δ = (1/d) ‖x_f − x_{f−1}‖² per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from statebridge.prune.policy import ChunkRecord, ScoredPolicy


@dataclass(frozen=True)
class TemporalDifference(ScoredPolicy):
    """Score a token by its change against the same place one frame earlier; the session's first frame is all new."""

    name: ClassVar[str] = "temporal_difference"

    def score(self, record: ChunkRecord) -> Tensor:
        """Return δ [B, N]; infinite in the first frame of the session."""
        rows, _, d = record.final.shape
        frames = record.final.float().reshape(rows, -1, record.frame_tokens, d)  # [B, F, n, d]
        change = (frames[:, 1:] - frames[:, :-1]).square().mean(-1)  # [B, F − 1, n]
        if record.previous is None:
            first = torch.full_like(frames[:, 0, :, 0], torch.inf)
        else:
            first = (frames[:, 0] - record.previous.float()).square().mean(-1)
        return torch.cat([first[:, None], change], 1).flatten(1)
