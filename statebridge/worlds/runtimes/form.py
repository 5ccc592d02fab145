"""What may come into a world session from outside: actions, moves, frames, and the tensors of a checkpoint.

All of it is checked before anything of the session changes. Knows forms, no model and no session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from statebridge.errors import ConfigError, StoreError

Tensor = torch.Tensor


def checked_actions(actions: Sequence[int], frames: int) -> Tensor:
    """Actions of so many frames as int64 [frames]."""
    if len(actions) != frames or not all(action in range(5) for action in actions):
        raise ConfigError(f"{actions} are not {frames} actions from 0 to 4; give one a frame.")
    return torch.tensor([int(action) for action in actions])


def checked_moves(moves: Tensor, frames: int) -> Tensor:
    """Moves of so many frames, [frames, 3] and finite."""
    if moves.shape != (frames, 3) or not bool(moves.isfinite().all()):
        raise ConfigError(
            f"The moves {tuple(moves.shape)} are not {frames} rows of three finite numbers; give one a frame."
        )
    return moves


def checked_frames(frames: Tensor, count: int, size: int) -> Tensor:
    """So many frames that were seen, float32 [count, 3, size, size] and finite."""
    if frames.shape != (count, 3, size, size) or frames.dtype != torch.float32:
        raise ConfigError(
            f"The frames are {frames.dtype} {tuple(frames.shape)}, not float32 {(count, 3, size, size)}; scale "
            "them to [-1, 1] and to the model's size."
        )
    if not bool(frames.isfinite().all()):
        raise ConfigError("The frames hold values that are no numbers; look at what rendered them.")
    return frames


def require_form(tensors: Mapping[str, Tensor], empty: Mapping[str, Tensor], frames: int) -> None:
    """Refuse tensors that no session of this kind holds.

    Parameters
    ----------
    tensors
        All tensors of a session by name.
    empty
        The same of a session that has seen nothing: axes of length 0 are the ones that grow.
    frames
        Frames a chunk.

    Raises
    ------
    StoreError
        When one has another dtype or shape, or those of one prefix disagree on the number of chunks.
    """
    chunks: dict[str, tuple[str, float]] = {}
    for name, tensor in tensors.items():
        wanted = empty[name]
        fits = tensor.dtype == wanted.dtype and tensor.ndim == wanted.ndim
        if not fits or any(a != b for a, b in zip(tensor.shape, wanted.shape, strict=True) if b):
            raise StoreError(
                f"{name} is {tensor.dtype} {tuple(tensor.shape)}, and such a session holds {wanted.dtype} "
                f"{tuple(wanted.shape)} with any number for 0; restore it whole."
            )
        prefix = name.partition(".")[0]
        if prefix != "layers":
            here = len(tensor) / (1 if name.endswith(".chunks") else frames)
            first, there = chunks.setdefault(prefix, (name, here))
            if here != there or here % 1:
                raise StoreError(
                    f"{name} has {here:g} chunks, and {first} has {there:g}; restore both whole."
                )
