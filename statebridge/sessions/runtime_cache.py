"""The memory of a chat on a model: its size beforehand, its way off the device, its random generator.

Knows transformers caches through `statebridge.capture`, and no sessions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from statebridge.capture import Continuation, profile
from statebridge.capture.walker import layer_parts
from statebridge.errors import CaptureError, StateMismatch
from statebridge.state import HybridState, LayerState

#: Bookkeeping of one token of a row: its id, its place in the mask, its position.
_TOKEN_BYTES = 8 + 1 + 8
#: Bookkeeping of a row: its next position.
_ROW_BYTES = 8


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors: all of it where one is a view, and once where several share it."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def state_bytes(model: Any) -> tuple[int, int]:
    """Bytes that one more token of a row adds to a state, and those of a row of any length."""
    token, fixed = _TOKEN_BYTES, _ROW_BYTES
    facts = profile(model)
    for spec, dtypes in zip(facts.identity.layers, facts.dtypes, strict=True):
        for field, dtype in dtypes.items():
            size = dtype.itemsize
            for axis in getattr(spec, field):
                size *= axis
            if field in ("key", "value"):
                token += size
            else:
                fixed += size
    return token, fixed


def unread(
    pending: torch.Tensor | None, given: torch.Tensor | None, rows: int | None, vocabulary: int
) -> torch.Tensor:
    """Pending and given tokens together, int64 [B, N] on the CPU.

    Parameters
    ----------
    pending, given
        Token ids [B, N] each; None without.
    rows
        Rows of the session; None while it has none.
    vocabulary
        Number of tokens that the model knows; another one would fail in the middle of a pass.

    Raises
    ------
    CaptureError
        When there is no token, one that the model does not know, or another number of rows.
    """
    parts = [part for part in (pending, given) if part is not None]
    if any(not isinstance(p, torch.Tensor) or p.is_floating_point() or p.dtype == torch.bool for p in parts):
        raise CaptureError("Token ids must be integers in a tensor [B, N], as a tokenizer gives them.")
    if not parts or any(part.ndim != 2 for part in parts) or len({part.shape[0] for part in parts}) != 1:
        shapes = [tuple(part.shape) for part in parts]
        raise CaptureError(f"Give the session tokens [B, N], one row for each of its own; found {shapes}.")
    ids = torch.cat([part.detach().to("cpu", torch.int64) for part in parts], dim=1)
    if ids.numel() == 0 or rows not in (None, ids.shape[0]):
        expected = "B" if rows is None else rows
        raise CaptureError(f"Tokens {tuple(ids.shape)} must be [{expected}, N] with at least one a row.")
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise CaptureError(
            f"Tokens from {int(ids.min())} to {int(ids.max())} are not all among the model's {vocabulary}; use its "
            "own tokenizer."
        )
    return ids


def to_host(live: Continuation) -> HybridState:
    """The state of a live cache in host memory, a tensor at a time."""
    with torch.inference_mode(False), torch.no_grad():
        layers = tuple(
            LayerState(**layer_parts(layer)).map(lambda _, t: t.detach().to("cpu", copy=True))
            for layer in live.cache.layers
        )
    return HybridState(layers, live.bookkeeping).validate()


def require_kind(saved: int, device: torch.device) -> None:
    """Raise `StateMismatch` unless `saved` is the size in bytes of a random state of this kind of device."""
    own = torch.Generator(device).get_state().numel()
    if saved != own:
        raise StateMismatch(
            f"this chat samples from a generator of another kind of device than {device.type}",
            {"bytes of its random state": (own, saved)},
            "Open it where the model is on the kind of device that it was stored from.",
        )


def carried(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """A generator on `device` that goes on where another one stands; of another kind, it begins from its seed."""
    there = torch.Generator(device)
    if there.device.type == generator.device.type:
        there.set_state(generator.get_state())
    else:
        there.manual_seed(generator.initial_seed())
    return there


@contextlib.contextmanager
def drawing_from(generator: torch.Generator, seed: int | None) -> Iterator[None]:
    """Let the device's default generator go on where `generator` stands; afterwards each has its own again."""
    device = generator.device
    if seed is not None:
        generator.manual_seed(seed)
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        if on_cuda:
            torch.cuda.set_rng_state(generator.get_state(), device)
        else:
            torch.set_rng_state(generator.get_state())
        yield
        generator.set_state(torch.cuda.get_rng_state(device) if on_cuda else torch.get_rng_state())
