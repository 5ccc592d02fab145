"""The discrepancy that pruning reads off a trajectory, and the step it is read at.

ℓ = (1/d) ‖x̂0(τ*) − x_final‖² per token: x̂0(τ*) is the clean prediction at the probe step τ*, x_final what the
same trajectory ended in, d the values of a token. A small ℓ says that the kept context explains the token
already. Both come from steps that were taken anyway, so the score costs no model call.

Knows tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from statebridge.errors import PruneError


def token_discrepancy(probe: Tensor, final: Tensor) -> Tensor:
    """Return ℓ float32 [B, N] of token values [B, N, d]."""
    return (probe.float() - final.float()).square().mean(-1)


def require_probe(step: int, schedule: Sequence[float]) -> None:
    """Refuse a probe step that the schedule does not have, or that can tell nothing.

    Raises
    ------
    PruneError
        When the step is outside the schedule, or is the last: there x̂0 is the final sample itself.
    """
    if not 0 <= step < len(schedule):
        raise PruneError(
            f"Probe step {step} is outside the schedule of {len(schedule)} steps; choose 0 to {len(schedule) - 2}."
        )
    if step == len(schedule) - 1:
        raise PruneError(
            f"Probe step {step} is the last of the schedule, where the prediction is the final sample and every "
            f"discrepancy is 0; choose 0 to {step - 1}."
        )
