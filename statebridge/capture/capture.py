"""Read a state out of a model's cache, and put one back.

    state = capture(model, cache, input_ids=ids)   after a forward pass over ids
    state = prefill(model, ids).state()            the same, with the forward pass
    cache = restore(state, model)                  a fresh transformers cache

Capturing clones, restoring clones: nothing that happens to a cache moves a state, and two restores never
share memory. What cannot be honoured is refused with the reason.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from statebridge.capture.model import ModelProfile, backend_of, profile, text_config
from statebridge.capture.walker import install_layer, new_cache, read_cache
from statebridge.errors import CaptureError, StateMismatch
from statebridge.state import Bookkeeping, HybridState


def capture(
    model: Any,
    cache: Any,
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    schedule: tuple[int, ...] | None = None,
    tokenizer: str = "",
) -> HybridState:
    """Capture the state that `model` holds after it has read `input_ids`.

    Parameters
    ----------
    model
        The transformers causal language model that filled the cache.
    cache
        Its cache, after a forward pass over all of `input_ids`.
    input_ids
        Every token that was read, int64 [B, T], in the layout that was given to the model.
    attention_mask
        [B, T], 0 where `input_ids` was padded; left padding only for models with recurrent layers.
    position_ids
        Rotary positions that were given to the model, [B, T] or, for multimodal prefixes, [3, B, T]. Without
        it, the positions of a plain forward pass: 0 … T − 1 in every row. After `generate` on a padded batch
        pass what generate used (the running count of the mask). For a multimodal model whose prefix held
        images, leave it out: `rope_deltas` of the model give the next position, and such keys can be
        restored, not translated.
    schedule
        Lengths of the forward passes, in order; one pass when left out.
    tokenizer
        Digest of the tokenizer (`statebridge.bridge.tokenizer_digest`), "" when unknown.

    Returns
    -------
    HybridState
        The state, in memory of its own, outside autograd and inference mode.

    Raises
    ------
    CaptureError
        When lengths disagree, the cache is empty or partly filled, or padding has polluted R and C.
    UnsupportedModel
        When the family, its cache or the transformers version cannot be captured exactly.
    """
    facts = profile(model)
    layers = read_cache(cache, facts.identity.layers)
    book = _bookkeeping(model, facts, input_ids, attention_mask, position_ids, schedule, tokenizer)
    state = HybridState(layers, book)
    try:
        return state.validate()
    except StateMismatch as error:
        raise CaptureError(
            f"The cache does not hold exactly these {book.length} tokens ({error}) After generate, the cache "
            "lacks the last token: pass sequences[:, :-1]."
        ) from error


def restore(
    state: HybridState, model: Any, *, allow_partial: bool = False, differentiable: bool = False
) -> DynamicCache:
    """Put a state into a fresh transformers cache for `model`.

    Parameters
    ----------
    state
        A state of this model (or one that a bridge made for it).
    model
        The model that will continue; tensors go to its layers' devices, K and C to its dtype, R stays as it is.
    allow_partial
        Accept a state that lacks components; what is missing starts as if the model had read nothing.
    differentiable
        Keep the state's tensors in the autograd graph, so that gradients reach every component.

    Returns
    -------
    DynamicCache
        A cache that shares no memory with the state (unless `differentiable`).

    Raises
    ------
    StateMismatch
        When the state is of another model, disagrees with itself, or is partial without `allow_partial`.
    """
    facts = profile(model)
    state.bookkeeping.model.require(
        facts.identity,
        "this state cannot be restored into this model",
        "Restore it into the model it was captured from, or translate it with a bridge.",
    )
    state.validate()
    if state.missing and not allow_partial:
        raise StateMismatch(
            "this state is partial",
            {
                "components": (
                    "K, R and C as the model has them",
                    f"without {', '.join(sorted(state.missing))}",
                )
            },
            "Pass allow_partial=True to leave the missing components uninitialised.",
        )
    cache = new_cache(model)
    for index, layer in enumerate(state.layers):
        install_layer(cache, index, layer, facts.devices[index], facts.dtypes[index], differentiable)
    return cache


def _bookkeeping(
    model: Any,
    facts: ModelProfile,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    schedule: tuple[int, ...] | None,
    tokenizer: str,
) -> Bookkeeping:
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise CaptureError(
            f"input_ids must be [B, T] with at least one token, found {tuple(input_ids.shape)}."
        )
    ids = input_ids.detach().to("cpu", torch.int64, copy=True)
    length = ids.shape[1]
    mask = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        if attention_mask.shape != ids.shape:
            raise CaptureError(
                f"attention_mask {tuple(attention_mask.shape)} and input_ids {tuple(ids.shape)} differ in shape; "
                "pass the two-dimensional mask over all tokens read."
            )
        mask = attention_mask.detach().to("cpu").bool().clone()
    check_padding(
        mask, recurrent=bool(facts.rule.recurrent_axes or facts.rule.conv_layout(text_config(model)))
    )
    if schedule is not None and sum(schedule) != length:
        raise CaptureError(
            f"The schedule {schedule} adds up to {sum(schedule)}, but {length} tokens were read."
        )
    positions, next_position = _positions(model, ids, position_ids)
    return Bookkeeping(
        token_ids=ids,
        pad_mask=mask,
        positions=positions,
        next_position=next_position,
        model=facts.identity,
        tokenizer=tokenizer,
        schedule=schedule if schedule is not None else (length,),
        conv_layout=facts.rule.conv_layout(text_config(model)),
        recurrent_axes=facts.rule.recurrent_axes,
        backend=backend_of(model),
    )


def check_padding(mask: torch.Tensor, recurrent: bool) -> None:
    """Refuse padding that has gone into R and C, or rows without a token.

    Raises
    ------
    CaptureError
        When a row has no token, or a model with recurrent layers read padding after tokens.
    """
    if not bool(mask.any(1).all()):
        raise CaptureError("A row of the batch holds no token at all; leave it out.")
    after_token = mask.int().diff(dim=1).lt(0).any(1)
    if recurrent and bool(after_token.any()):
        rows = after_token.nonzero().flatten().tolist()
        raise CaptureError(
            f"Rows {rows} have padding after tokens, which has decayed R and shifted C beyond repair; "
            "pad on the left and run the prefix again."
        )


def _positions(
    model: Any, ids: torch.Tensor, position_ids: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor]:
    batch, length = ids.shape
    if position_ids is not None:
        positions = position_ids.detach().to("cpu", torch.int64)
        if positions.ndim == 3 and positions.shape[0] == 4:
            positions = positions[1:]  # text positions first, then time, height, width
        if (
            positions.shape[-1] != length
            or positions.ndim not in (2, 3)
            or (positions.ndim == 3 and positions.shape[0] != 3)
        ):
            raise CaptureError(
                f"position_ids {tuple(position_ids.shape)} do not fit input_ids {tuple(ids.shape)}; "
                "pass [B, T], or [3, B, T] for a multimodal prefix."
            )
        positions = positions.expand(*positions.shape[:-2], batch, length).clone()
        largest = positions if positions.ndim == 2 else positions.amax(0)
        return positions, largest.amax(-1) + 1
    deltas = getattr(getattr(model, "model", None), "rope_deltas", None)
    if isinstance(deltas, torch.Tensor) and bool((deltas != 0).any()):
        deltas = deltas.detach().to("cpu", torch.int64).reshape(-1)
        if deltas.numel() != batch:
            raise CaptureError(
                f"The model's rope_deltas are of {deltas.numel()} rows, the cache of {batch}: they are stale. "
                "Capture right after the forward pass, or pass position_ids."
            )
        return None, length + deltas
    positions = torch.arange(length).expand(batch, length).clone()
    return positions, positions[:, -1] + 1
