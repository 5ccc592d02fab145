"""Reversed discrepancy: keep what DeCoPrune would drop. The control for the sign of its score."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from statebridge.prune.policies.decoprune import DeCoPrune
from statebridge.prune.policy import ChunkRecord


@dataclass(frozen=True)
class ReversedDiscrepancy(DeCoPrune):
    """Score a token by −ℓ; a threshold of −γ keeps what lies strictly below γ."""

    name: ClassVar[str] = "reversed_discrepancy"

    def score(self, record: ChunkRecord) -> Tensor:
        """Return −ℓ [B, N]."""
        return -super().score(record)
