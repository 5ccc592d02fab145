"""Bookkeeping m of a state: what was read, where, by whom.

Tensors alone do not make a state: a continuation needs to know how many tokens each row has seen, which
slots are padding, at which positions the keys were rotated, and which model, kernel and schedule produced
them. Knows values only.

Rows are as long as the prefix and lie on the host. They are checked and copied with numpy, on one thread: torch wakes
its thread pool for 32,768 elements or more, which took 10 ms an operation where other work kept the cores busy.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from statebridge.errors import StateMismatch
from statebridge.state.identity import ModelIdentity


@dataclass(frozen=True)
class Bookkeeping:
    """Everything of a state that is not K, R or C.

    Attributes
    ----------
    token_ids
        Tokens that were read, int64 [B, T]; padding slots hold whatever the caller padded with.
    pad_mask
        bool [B, T], True where a slot holds a real token.
    positions
        Rotary position of each cached key, int64 [B, T], or [3, B, T] for multimodal prefixes; None when the
        caller did not say (such keys can be restored, not translated).
    next_position
        Position of the next token of each row, int64 [B].
    model
        Identity of the model that the state belongs to.
    tokenizer
        Digest of the tokenizer, "" when unknown.
    schedule
        Lengths of the forward passes that produced the state, in order. Another schedule gives another state
        within rounding; equal schedules are bit-exact.
    conv_layout
        (name, first channel, number of channels) of each block of the convolution history, Q | K | V for Gated
        DeltaNet.
    recurrent_axes
        Axis letters of a recurrent state without the batch axis, "HKV" for Gated DeltaNet.
    backend
        Attention implementation, delta-rule kernel and library versions.
    """

    token_ids: torch.Tensor
    pad_mask: torch.Tensor
    positions: torch.Tensor | None
    next_position: torch.Tensor
    model: ModelIdentity
    tokenizer: str = ""
    schedule: tuple[int, ...] = ()
    conv_layout: tuple[tuple[str, int, int], ...] = ()
    recurrent_axes: str = ""
    backend: tuple[tuple[str, str], ...] = ()

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return int(self.token_ids.shape[0])

    @property
    def length(self) -> int:
        """Slots T per row, padding included."""
        return int(self.token_ids.shape[1])

    @property
    def seen_tokens(self) -> torch.Tensor:
        """Real tokens read by each row, int64 [B]."""
        return torch.from_numpy(_host(self.pad_mask).sum(-1))

    @property
    def padded(self) -> bool:
        """Whether any slot is padding."""
        return not bool(_host(self.pad_mask).all())

    @property
    def rope_deltas(self) -> torch.Tensor:
        """Offset between the next position and the tokens seen, int64 [B]; 0 for text counted from 0."""
        return self.next_position - self.seen_tokens

    @property
    def token_digests(self) -> tuple[str, ...]:
        """sha256 of each row's real token ids (little-endian int64)."""
        return tuple(
            hashlib.sha256(row[mask].astype("<i8").tobytes()).hexdigest()
            for row, mask in zip(_host(self.token_ids), _host(self.pad_mask), strict=True)
        )

    def inconsistencies(self) -> dict[str, tuple[object, object]]:
        """What disagrees inside the bookkeeping: name -> (expected, found)."""
        found: dict[str, tuple[object, object]] = {}
        slots = tuple(self.token_ids.shape)
        if len(slots) != 2:
            return {"token_ids": ("[B, T]", slots)}
        shapes = {"pad_mask": slots, "positions": slots, "next_position": slots[:1]}
        for name, shape in shapes.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            allowed = (shape, (3, *slots)) if name == "positions" else (shape,)
            if tuple(tensor.shape) not in allowed:
                found[name] = (shape, tuple(tensor.shape))
        for name in ("token_ids", "pad_mask", "positions", "next_position"):
            tensor = getattr(self, name)
            dtype = torch.bool if name == "pad_mask" else torch.int64
            if tensor is not None and tensor.dtype != dtype:
                found[f"{name} dtype"] = (str(dtype), str(tensor.dtype))
        if found:
            return found
        mask = _host(self.pad_mask)
        if not mask.any(1).all():
            found["seen_tokens"] = ("at least one in every row", self.seen_tokens.tolist())
        elif self.positions is not None:
            axes = (0, 2) if self.positions.ndim == 3 else 1
            after = np.where(mask, _host(self.positions), -1).max(axes) + 1
            if not np.array_equal(after, _host(self.next_position)):
                found["next_position"] = (after.tolist(), self.next_position.tolist())
        return found

    def copied(self, model: ModelIdentity) -> Bookkeeping:
        """The same of another model, in memory of its own."""
        held = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        copies: dict[str, Any] = {n: torch.from_numpy(_host(tensor).copy()) for n, tensor in held.items()}
        return dataclasses.replace(self, model=model, **copies)

    def extended(self, next_ids: torch.Tensor) -> Bookkeeping:
        """The bookkeeping after `next_ids` [B, N] were read in one pass."""
        new = next_ids.shape[1]
        fresh = self.next_position[:, None] + torch.arange(new)  # [B, N]
        positions = self.positions
        if positions is not None:
            positions = _joined(positions, fresh.expand(*positions.shape[:-1], new))
        return dataclasses.replace(
            self,
            token_ids=_joined(self.token_ids, next_ids),
            pad_mask=_joined(self.pad_mask, torch.ones_like(next_ids, dtype=torch.bool)),
            positions=positions,
            next_position=self.next_position + new,
            schedule=(*self.schedule, new),
        )

    def select(self, rows: torch.Tensor) -> Bookkeeping:
        """The bookkeeping of the given rows, int64 indices [n]."""
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[rows],
            pad_mask=self.pad_mask[rows],
            positions=None if self.positions is None else self.positions.index_select(-2, rows),
            next_position=self.next_position[rows],
        )

    def trimmed(self, slots: int) -> Bookkeeping:
        """The bookkeeping without its first `slots` slots."""
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[:, slots:],
            pad_mask=self.pad_mask[:, slots:],
            positions=None if self.positions is None else self.positions[..., slots:],
        )

    def left_padded(self, slots: int) -> Bookkeeping:
        """The bookkeeping with `slots` padding slots put in front."""
        pad = (slots, 0)
        return dataclasses.replace(
            self,
            token_ids=torch.nn.functional.pad(self.token_ids, pad),
            pad_mask=torch.nn.functional.pad(self.pad_mask, pad),
            positions=None if self.positions is None else torch.nn.functional.pad(self.positions, pad),
        )

    @staticmethod
    def merged(parts: Sequence[Bookkeeping]) -> Bookkeeping:
        """Rows of several bookkeepings of equal length, one after the other.

        Raises
        ------
        StateMismatch
            When the parts are of different models, tokenizers, layouts, or know and do not know positions.
        """
        first = parts[0]
        for other in parts[1:]:
            first.model.require(other.model, "states of different models cannot be merged")
            for name in ("tokenizer", "conv_layout", "recurrent_axes"):
                if getattr(first, name) != getattr(other, name):
                    raise StateMismatch(
                        "these states cannot be merged",
                        {name: (getattr(first, name), getattr(other, name))},
                        "Merge states that were captured from one model with one tokenizer.",
                    )
        known = [part.positions for part in parts if part.positions is not None]
        if known and (len(known) != len(parts) or len({p.ndim for p in known}) > 1):
            raise StateMismatch(
                "these states cannot be merged",
                {"positions known": (parts[0].positions is not None, parts[1].positions is not None)},
                "Capture all of them with position_ids, or none.",
            )
        same_schedule = len({part.schedule for part in parts}) == 1
        return dataclasses.replace(
            first,
            token_ids=torch.cat([part.token_ids for part in parts]),
            pad_mask=torch.cat([part.pad_mask for part in parts]),
            positions=torch.cat(known, dim=-2) if known else None,
            next_position=torch.cat([part.next_position for part in parts]),
            # rows with different histories have no one schedule
            schedule=first.schedule if same_schedule else (),
        )


def _host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    return tensor.cpu().numpy()


def _joined(rows: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.concatenate((_host(rows), _host(new)), axis=-1))
