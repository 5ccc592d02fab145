"""Dynamic and static heads: which heads look back at old content, by their attention mass.

A head that puts little of its attention between sink and window loses little when everything there goes; it is
static and follows the streaming policy. The others are dynamic and are pruned by discrepancy. The split is
measured once, on a full cache, and then fixed.

Knows attention masses, no models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from statebridge.errors import PruneError

if TYPE_CHECKING:
    from statebridge.prune.session import PrunedSession


@dataclass(frozen=True)
class HeadSplit:
    """Which heads are dynamic.

    Attributes
    ----------
    dynamic
        One tuple of flags a layer, one flag a head.

    Raises
    ------
    PruneError
        When no head at all is dynamic, or none is static: then the split is another policy.
    """

    dynamic: tuple[tuple[bool, ...], ...]

    def __post_init__(self) -> None:
        flags = [flag for layer in self.dynamic for flag in layer]
        if all(flags) or not any(flags):
            raise PruneError(
                "A head split needs dynamic and static heads; with all heads of one kind use DeCoPrune or Streaming."
            )

    @property
    def share(self) -> float:
        """Share of dynamic heads."""
        flags = [flag for layer in self.dynamic for flag in layer]
        return sum(flags) / len(flags)

    @property
    def heads(self) -> tuple[tuple[int, ...], ...]:
        """Indices of the dynamic heads, layer by layer."""
        return tuple(tuple(i for i, flag in enumerate(layer) if flag) for layer in self.dynamic)

    @classmethod
    def from_mass(cls, mass: Tensor, share: float) -> HeadSplit:
        """Call the `share` of heads with the largest mass dynamic.

        Parameters
        ----------
        mass
            Attention on what lies between sink and window, [layers, heads]; equal masses go by position.
        share
            Between 0 and 1.

        Raises
        ------
        PruneError
            When the share leaves no head on one side.
        """
        count = round(share * mass.numel())
        order = torch.sort(mass.flatten(), descending=True, stable=True).indices[:count]
        flags = torch.zeros(mass.numel(), dtype=torch.bool)
        flags[order.cpu()] = True
        return cls(tuple(tuple(row) for row in flags.view(mass.shape).tolist()))


def measure_split(session: PrunedSession, clean: Tensor, condition: Any, share: float) -> HeadSplit:
    """Split heads by the attention of one clean chunk on what lies between sink and window.

    Parameters
    ----------
    session
        A session with an unpruned history longer than its policy's sink and window; it is left as it is.
    clean, condition
        A chunk that could come next.
    share
        Share of heads to call dynamic.

    Raises
    ------
    PruneError
        When nothing lies between sink and window yet, or the history is pruned.
    """
    (slots, *more), clock = session.cache.groups, session.clock
    sink, window = session.policy.sink, session.policy.window
    middle = (slots.chunks >= sink) & (slots.chunks < clock.chunk - window)
    if more or slots.padded or not bool(middle.any()):
        raise PruneError(
            "A head split is measured on a full history that is longer than sink and window; use the policy Full, "
            f"with more than {sink + window} chunks."
        )
    with torch.no_grad():
        history = session.backbone.read(session.cache, None)
        mass = session.backbone.attention_mass(history, clock, clean, condition, middle)
    return HeadSplit.from_mass(mass, share)
