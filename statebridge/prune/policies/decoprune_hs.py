"""DeCoPrune-HS: dynamic heads are pruned by discrepancy, static heads stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from statebridge.errors import PruneError
from statebridge.prune.heads import HeadSplit
from statebridge.prune.policies.decoprune import DeCoPrune


@dataclass(frozen=True)
class DeCoPruneHS(DeCoPrune):
    """DeCoPrune in the dynamic heads only.

    Parameters
    ----------
    split
        Which heads are dynamic. `keep_ratio` counts all heads: the dynamic ones keep keep_ratio / their share,
        so that the cache is as large as that of a policy which treats all heads alike.

    Raises
    ------
    PruneError
        Without a split, or when the budget is more than the dynamic heads can hold.
    """

    split: HeadSplit | None = None

    name: ClassVar[str] = "decoprune_hs"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split is None:
            raise PruneError("decoprune_hs needs a head split; measure one with `measure_split`.")
        if self.keep_ratio is not None and self.keep_ratio > self.split.share:
            raise PruneError(
                f"A keep_ratio of {self.keep_ratio} over all heads is more than the dynamic heads are "
                f"({self.split.share:.2f}); lower it, or call more heads dynamic."
            )

    def first_heads(self, layers: int, heads: int) -> tuple[tuple[int, ...], ...] | None:
        """Return the dynamic heads, layer by layer."""
        assert self.split is not None
        found = {len(layer) for layer in self.split.dynamic}
        if len(self.split.dynamic) != layers or found != {heads}:
            raise PruneError(
                f"The head split is for {len(self.split.dynamic)} layers of {sorted(found)} heads, and the model has "
                f"{layers} layers of {heads}; measure it on this model."
            )
        return self.split.heads

    def keep(self, scores: Tensor) -> Sequence[Tensor | None]:
        """Return the masks of the dynamic and of the static heads."""
        return self.mask(scores), torch.zeros_like(scores, dtype=torch.bool)

    @property
    def budget(self) -> float | None:
        """Share of a chunk that a dynamic head keeps."""
        assert self.split is not None
        return None if self.keep_ratio is None else min(1.0, self.keep_ratio / self.split.share)
