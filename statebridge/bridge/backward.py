"""Choose, once, how gradients pass through the receiver.

Where fla is installed, transformers runs its kernels, and their backward pass raises on some GPUs (fla 0.6.0 on
Hopper with Triton 3.4 to 3.7.0) while the forward pass is fine. Putting the torch functions behind the kernels
back for a while gives the same gradients, slower. A backward pass over a handful of tokens decides before any
training. Knows models, no losses.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Literal

import torch

from statebridge.capture import continue_from, prefill
from statebridge.capture.kernels import reference_kernels
from statebridge.errors import FitError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BackwardPath:
    """Which functions a differentiable pass runs.

    Attributes
    ----------
    name
        "installed" for those that transformers chose, "reference" for the torch functions behind them.
    reason
        What the probe found.
    """

    name: Literal["installed", "reference"]
    reason: str

    def over(self, model: Any) -> contextlib.AbstractContextManager[None]:
        """Run `model` on this path inside the `with` block; others in the same process too."""
        return reference_kernels(model) if self.name == "reference" else contextlib.nullcontext()


def choose_backward(model: Any, ids: torch.Tensor) -> BackwardPath:
    """Find a path on which a backward pass reaches every part of a state.

    Parameters
    ----------
    model
        The receiver.
    ids
        Some token ids [B, T], T ≥ 2; the first half is read before the state, the rest after it.

    Returns
    -------
    BackwardPath
        What transformers chose if its backward pass works, else the torch reference. Also logged.

    Raises
    ------
    FitError
        When neither works.
    """
    failure = _failure(model, ids)
    if failure is None:
        path = BackwardPath("installed", "the backward pass through the installed kernels works")
    else:
        with reference_kernels(model):
            again = _failure(model, ids)
        if again is not None:
            raise FitError(
                f"No gradient passes through this receiver ({again}); use another device or dtype, or newer "
                "versions of torch and flash-linear-attention."
            )
        path = BackwardPath("reference", f"the backward pass through the installed kernels fails: {failure}")
    log.info("Training passes use the %s functions: %s.", path.name, path.reason)
    return path


def _failure(model: Any, ids: torch.Tensor) -> str | None:
    """Why a small backward pass fails, None where it works."""
    half = ids.shape[1] // 2
    with torch.inference_mode():
        state = prefill(model, ids[:, :half]).state()
    state = state.map(lambda _, tensor: tensor.requires_grad_())
    try:
        with torch.enable_grad():
            logits = continue_from(model, state, ids[:, half:], differentiable=True).logits
            torch.autograd.backward(logits.float().logsumexp(-1).sum())
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # kernels refuse in many ways, from assertions to compiler errors
        return f"{type(error).__name__}: {error}".splitlines()[0]
    for index, layer in enumerate(state.layers):
        for name, tensor in layer.tensors():
            if tensor.grad is None or not bool(tensor.grad.isfinite().all()):
                return f"layer {index} {name} has {'no' if tensor.grad is None else 'a non-finite'} gradient"
    return None
