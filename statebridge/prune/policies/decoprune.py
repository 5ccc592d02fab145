"""DeCoPrune: keep what the kept context did not explain yet, ℓ = (1/d) ‖x̂0(τ*) − x_final‖² > γ per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from statebridge.errors import PruneError
from statebridge.prune.discrepancy import token_discrepancy
from statebridge.prune.policy import ChunkRecord, ScoredPolicy


@dataclass(frozen=True)
class DeCoPrune(ScoredPolicy):
    """Score a token by its discrepancy; `threshold` is γ, published at 0.10."""

    name: ClassVar[str] = "decoprune"
    probes: ClassVar[bool] = True

    def score(self, record: ChunkRecord) -> Tensor:
        """Return ℓ [B, N]."""
        if record.probe is None:
            raise PruneError(
                f"{self.name} needs the clean prediction at the probe step, and none was recorded."
            )
        return token_discrepancy(record.probe, record.final)
