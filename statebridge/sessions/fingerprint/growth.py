"""How a buffer's size follows the length of the session: measured at several anchors, never declared."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from enum import StrEnum

#: Change of size that is none: JSON text gains a digit, an allocator rounds.
_TOLERANCE = 0.05


class Growth(StrEnum):
    """Class of a buffer."""

    FLAT = "flat"
    GROWING = "growing"
    WINDOWED = "windowed"  # grows first, then stays
    IRREGULAR = "irregular"
    UNKNOWN = "unknown"  # seen at one anchor only


def growth_of(nbytes: Mapping[int, int]) -> Growth:
    """The class that sizes in bytes at increasing lengths show; sizes within 5 % count as equal."""
    sizes = [nbytes[length] for length in sorted(nbytes)]
    if len(sizes) < 2:
        return Growth.UNKNOWN
    steps = [_step(before, after) for before, after in itertools.pairwise(sizes)]
    if not any(steps):
        return Growth.FLAT
    if min(steps) < 0:
        return Growth.IRREGULAR
    return Growth.GROWING if steps[-1] else Growth.WINDOWED


def _step(before: int, after: int) -> int:
    """-1, 0 or 1 for smaller, equal, larger."""
    if abs(after - before) <= _TOLERANCE * max(before, after):
        return 0
    return 1 if after > before else -1
