"""Continue from a state: forward passes that read new tokens only.

Positions and masks come from the state's bookkeeping, so that nothing about the prefix has to be said again.
Every result reports how many prefix tokens the model processed, counted at its embedding; it is 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache

from statebridge.capture.capture import bookkeeping_for, restore
from statebridge.capture.kernels import runnable_kernels
from statebridge.capture.model import cache_keyword, cache_of, identity_of, profile
from statebridge.capture.tokens import TokenCount, count_tokens
from statebridge.capture.walker import new_cache, read_cache
from statebridge.errors import CaptureError
from statebridge.state import Bookkeeping, HybridState


@dataclass
class Continuation:
    """A model's live cache after it read new tokens.

    Attributes
    ----------
    logits
        Logits of the new tokens [B, N, vocab], or of the last one only [B, 1, vocab].
    cache
        The live transformers cache; the next continuation changes it in place.
    bookkeeping
        Bookkeeping of prefix and new tokens together.
    new_tokens_processed, prefix_tokens_processed
        Tokens per row that the model read, counted at its embedding: the new ones, and those of the prefix.
    missing
        Components that a partial state left uninitialised.
    differentiable
        Whether gradients pass through the cache; further continuations then keep their graph too.
    lent
        What to call before the cache changes: it spends the states that borrow its tensors.
    """

    logits: torch.Tensor
    cache: DynamicCache
    bookkeeping: Bookkeeping
    new_tokens_processed: int
    prefix_tokens_processed: int
    missing: frozenset[str] = frozenset()
    differentiable: bool = False
    lent: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def state(self, *, borrow: bool = False) -> HybridState:
        """Capture the state as it is now.

        With `borrow` its tensors are the cache's own: for a state that a bridge translates at once. When the
        continuation goes on, which changes them, the state is spent and using it is refused.
        """
        layers = read_cache(self.cache, self.bookkeeping.model.layers, borrow=borrow)
        state = HybridState(layers, self.bookkeeping).validate()
        if borrow:
            self.lent.append(state.spending())
        return state


def prefill(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    tokenizer: str = "",
) -> Continuation:
    """Read a prefix in one forward pass, with every row's positions counted from its own first token.

    Parameters
    ----------
    model
        A causal language model of transformers.
    input_ids
        Token ids [B, T], padded on the left where rows differ in length.
    attention_mask
        [B, T], 0 at padding.
    tokenizer
        Digest of the tokenizer, "" when unknown.

    Returns
    -------
    Continuation
        `logits` [B, 1, vocab] of the last token; `.state()` captures the state. Its
        `prefix_tokens_processed` is 0 because all tokens read here are new.
    """
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    book = bookkeeping_for(model, input_ids, mask, positions, tokenizer=tokenizer)
    live = Continuation(torch.empty(0), new_cache(model), book, 0, 0)
    live.logits, count = _forward(model, live, book.token_ids, positions, last_only=True)
    live.new_tokens_processed = count.per_row
    return live


def continue_from(
    model: Any,
    state: HybridState | Continuation,
    next_ids: torch.Tensor,
    *,
    allow_partial: bool = False,
    differentiable: bool = False,
    last_logits_only: bool = False,
) -> Continuation:
    """Read `next_ids` after the prefix of `state`, which is not read again.

    Parameters
    ----------
    model
        The model that continues.
    state
        A state, which stays as it is, or an earlier `Continuation`, whose cache goes on in place.
    next_ids
        Next token ids [B, N], N ≥ 1; the first follows the prefix directly.
    allow_partial, differentiable
        As in `restore`.
    last_logits_only
        Compute the logits of the last token only.

    Returns
    -------
    Continuation
        `logits` [B, N, vocab]; `logits[:, i]` predicts the token after `next_ids[:, i]`.

    Raises
    ------
    StateMismatch
        When the state does not belong to the model.
    CaptureError
        When `next_ids` is empty or has another number of rows than the state.
    """
    next_ids = checked_next(next_ids, state.bookkeeping)
    live = _resumed(model, state, allow_partial, differentiable)
    widths = [1] * next_ids.shape[1] if profile(model).rule.single_step else [next_ids.shape[1]]
    logits, processed = [], 0
    for piece in torch.split(next_ids, widths, dim=1):
        positions = live.bookkeeping.next_position[:, None] + torch.arange(piece.shape[1])
        live.bookkeeping = live.bookkeeping.extended(piece)
        piece_logits, count = _forward(model, live, piece, positions, last_only=last_logits_only)
        logits.append(piece_logits)
        processed += count.per_row
    live.logits = logits[-1] if last_logits_only or len(logits) == 1 else torch.cat(logits, dim=1)
    live.new_tokens_processed = processed
    live.prefix_tokens_processed = max(processed - next_ids.shape[1], 0)
    return live


def checked_next(next_ids: torch.Tensor, book: Bookkeeping) -> torch.Tensor:
    """`next_ids` as int64 [B, N] on the CPU."""
    if next_ids.ndim != 2 or next_ids.shape[0] != book.batch_size or next_ids.shape[1] == 0:
        raise CaptureError(
            f"next_ids {tuple(next_ids.shape)} must be [{book.batch_size}, N] with at least one token a row."
        )
    if next_ids.is_floating_point():
        raise CaptureError(f"next_ids must be integers, found {next_ids.dtype}.")
    return next_ids.detach().to("cpu", torch.int64)


def _resumed(
    model: Any, state: HybridState | Continuation, allow_partial: bool, differentiable: bool
) -> Continuation:
    """A continuation that has read nothing new yet: the given one's cache, or a fresh one for a state."""
    if isinstance(state, HybridState):
        cache = restore(state, model, allow_partial=allow_partial, differentiable=differentiable)
        return Continuation(
            torch.empty(0), cache, state.bookkeeping, 0, 0, frozenset(state.missing), differentiable
        )
    state.bookkeeping.model.require(
        identity_of(model),
        "this continuation is of another model, or its weights have changed",
        "Continue with the model that began it.",
    )
    if "K" not in state.missing and state.cache.get_seq_length() != state.bookkeeping.length:
        raise CaptureError(
            f"The continuation's cache holds {state.cache.get_seq_length()} tokens, its bookkeeping "
            f"{state.bookkeeping.length}: it was changed elsewhere. Continue from a state instead."
        )
    while state.lent:
        state.lent.pop()()
    return dataclasses.replace(state)


def _forward(
    model: Any, live: Continuation, new_ids: torch.Tensor, positions: torch.Tensor, *, last_only: bool
) -> tuple[torch.Tensor, TokenCount]:
    """Logits of `new_ids`, which the bookkeeping of `live` already includes; its cache grows in place."""
    device = model.get_input_embeddings().weight.device
    # a mask over the new tokens alone would be accepted and silently wrong; without K there is no old slot
    masked = live.bookkeeping.padded and "K" not in live.missing
    grad = live.differentiable and torch.is_grad_enabled()
    # out of inference mode, whose tensors could not be written to in a later pass outside it
    with (
        count_tokens(model) as count,
        runnable_kernels(model),
        torch.inference_mode(False),
        torch.set_grad_enabled(grad),
    ):
        output = model(
            input_ids=new_ids.to(device),
            attention_mask=live.bookkeeping.pad_mask.to(device).long() if masked else None,
            position_ids=positions.to(device),
            use_cache=True,
            logits_to_keep=int(last_only),
            **{cache_keyword(model): live.cache},
        )
    if cache_of(output) is not live.cache:
        raise CaptureError("The model replaced the cache it was given, so its state cannot be followed.")
    return output.logits, count
