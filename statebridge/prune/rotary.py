"""Rotary coordinates of cached keys: who has rotated what, and re-indexing of old times.

Re-indexing squeezes the times of old keys into a fixed virtual span, so that attention never meets an offset
it was not trained on: t̃(t) = q0 − g(q0 − t), where q0 is the time of the first query frame, g the identity up
to `recent` and linear from there to `span`, which is where frame 0 of the session lands. Only key phases move;
tokens, values, and the rotation by height and width do not. Times may become fractions.

Knows coordinates, no frequencies and no models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from statebridge.errors import PruneError
from statebridge.worlds.cache import HistoryCache


class Rotation(StrEnum):
    """In which state a backbone hands over its keys."""

    RAW = "raw"  # before rotary embedding
    WRITTEN = "written"  # rotated at the coordinates they were written with
    UNKNOWN = "unknown"  # nobody can tell; such keys cannot be moved


@dataclass(frozen=True)
class Reindex:
    """The map g of re-indexing.

    Parameters
    ----------
    recent
        Offset, in frames, up to which times stay as they are.
    span
        Offset, in frames, at which frame 0 of the session lands once it is further back than that.

    Raises
    ------
    PruneError
        Unless 0 <= recent < span.
    """

    recent: float
    span: float

    def __post_init__(self) -> None:
        if not 0 <= self.recent < self.span:
            raise PruneError(
                f"Re-indexing keeps offsets up to {self.recent} frames within a span of {self.span}; give "
                "0 <= recent < span."
            )

    def times(self, t: Tensor, q0: float) -> Tensor:
        """Return the virtual times of keys written at `t`, for queries that begin at q0.

        Bit for bit `t` where nothing is to be squeezed: for recent keys, and for all while q0 <= span.
        """
        if q0 <= self.span:
            return t
        offset = q0 - t
        slope = (self.span - self.recent) / (q0 - self.recent)
        return torch.where(offset <= self.recent, t, q0 - (self.recent + (offset - self.recent) * slope))

    def coordinates(self, cache: HistoryCache) -> list[Tensor]:
        """Return the coordinates [B, S, 3] at which each group's keys are to be read; only t differs."""
        return [
            torch.cat([self.times(c[..., :1], cache.next_time), c[..., 1:]], -1)
            for c in (slots.coordinates for slots in cache.groups)
        ]


def keys_at(
    key: Tensor,
    held: Rotation,
    written: Tensor,
    wanted: Tensor | None,
    rotate: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return cached keys [B, H, S, D] rotated at the coordinates that are wanted.

    Parameters
    ----------
    key
        Keys as they are held.
    held
        Their state.
    written
        Coordinates [B, S, 3] they were written with.
    wanted
        Coordinates [B, S, 3] to read them at; None for those they were written with.
    rotate
        Rotates keys by coordinates. Rotations add, so one by a difference moves a rotated key.

    Raises
    ------
    PruneError
        When the state of the keys is unknown.
    """
    require_known(held)
    if held is Rotation.RAW:
        return rotate(key, written if wanted is None else wanted)
    return key if wanted is None else rotate(key, wanted - written)


def require_known(rotation: Rotation) -> None:
    """Refuse a backbone that cannot say whether its keys are rotated."""
    if rotation is Rotation.UNKNOWN:
        raise PruneError(
            "The adapter does not say whether its cached keys are rotated, so they cannot be moved to other "
            "positions; set its `rotation` to raw or written."
        )
