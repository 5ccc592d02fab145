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

from statebridge.capture.model import backend_of, profile, text_config
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
        it, 0 … T − 1; a padded batch must say them, because generate counts tokens and a plain forward pass
        slots. A prefix with images may leave them out right after its forward pass: `rope_deltas` of the
        model then give the next position, and such keys can be restored, not translated.
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
    book = bookkeeping_for(
        model, input_ids, attention_mask, position_ids, schedule=schedule, tokenizer=tokenizer
    )
    state = HybridState(read_cache(cache, book.model.layers), book)
    try:
        return state.validate()
    except StateMismatch as error:
        raise CaptureError(
            f"The cache does not hold exactly these {book.length} tokens ({error}) After generate, the cache "
            "lacks the last token: pass sequences[:, :-1]."
        ) from error


def restore(
    state: HybridState,
    model: Any,
    *,
    allow_partial: bool = False,
    differentiable: bool = False,
    consume: bool = False,
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
    consume
        Give the state's memory to the cache instead of copying it. The model will change it, so the state is
        spent, and so are states that share its tensors (`without`, `to`): using them afterwards is refused.

    Returns
    -------
    DynamicCache
        A cache that shares no memory with the state (unless `differentiable` or `consume`).

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
    without_keys = [
        i
        for i, (layer, spec) in enumerate(zip(state.layers, facts.identity.layers, strict=True))
        if spec.key and layer.key is None
    ]
    if without_keys and "K" in state.components:
        raise StateMismatch(
            "this state has keys in some attention layers only, and one mask cannot serve both",
            {"layers without K": ([], without_keys)},
            "Leave K out of every layer or of none.",
        )
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
        install_layer(
            cache,
            index,
            layer,
            facts.identity.layers[index],
            facts.devices[index],
            facts.dtypes[index],
            differentiable,
            consume,
        )
    if consume:
        state.give_away()
    return cache


def bookkeeping_for(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    *,
    schedule: tuple[int, ...] | None = None,
    tokenizer: str = "",
) -> Bookkeeping:
    """Bookkeeping of a prefix, from what was given to the model; arguments as in `capture`.

    Raises
    ------
    CaptureError
        When the arguments disagree, or padding has gone into R and C.
    """
    facts = profile(model)
    if input_ids.ndim != 2 or input_ids.numel() == 0 or input_ids.is_floating_point():
        raise CaptureError(
            f"input_ids must be integers [B, T] with at least one token, found {tuple(input_ids.shape)}."
        )
    ids = input_ids.detach().to("cpu", torch.int64, copy=True)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        if attention_mask.shape != ids.shape:
            raise CaptureError(
                f"attention_mask {tuple(attention_mask.shape)} and input_ids {tuple(ids.shape)} differ in shape; "
                "pass the two-dimensional mask over all tokens read."
            )
        mask = attention_mask.detach().to("cpu").bool().clone()
    _check_padding(mask, facts.recurrent)
    length = ids.shape[1]
    if schedule is None:
        schedule = (length,)
    if sum(schedule) != length:
        raise CaptureError(
            f"The schedule {schedule} adds up to {sum(schedule)}, but {length} tokens were read."
        )
    if position_ids is not None:
        positions = _given_positions(position_ids, ids)
        largest = positions if positions.ndim == 2 else positions.amax(0)
        next_position = largest.masked_fill(~mask, -1).amax(-1) + 1
    elif (deltas := _rope_deltas(model, ids)) is not None:
        positions, next_position = None, mask.sum(-1) + deltas
    elif bool(mask.all()) or facts.identity.rope is None:
        positions = torch.arange(length).repeat(ids.shape[0], 1)
        next_position = positions[:, -1] + 1
    else:
        raise CaptureError(
            "Rotary positions of a padded prefix depend on who ran it: pass position_ids, which are "
            "`(mask.cumsum(-1) - 1).clamp(min=0)` after generate and 0 … T − 1 after a plain forward pass."
        )
    return Bookkeeping(
        token_ids=ids,
        pad_mask=mask,
        positions=positions,
        next_position=next_position,
        model=facts.identity,
        tokenizer=tokenizer,
        schedule=tuple(schedule),
        conv_layout=facts.rule.conv_layout(text_config(model)),
        recurrent_axes=facts.rule.recurrent_axes,
        backend=backend_of(model),
    )


def _check_padding(mask: torch.Tensor, recurrent: bool) -> None:
    if not bool(mask.any(1).all()):
        raise CaptureError("A row of the batch holds no token at all; leave it out.")
    after_token = mask.int().diff(dim=1).lt(0).any(1)
    if recurrent and bool(after_token.any()):
        rows = after_token.nonzero().flatten().tolist()
        raise CaptureError(
            f"Rows {rows} have padding after tokens, which has decayed R and shifted C beyond repair; "
            "pad on the left and run the prefix again."
        )


def _given_positions(position_ids: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    positions = position_ids.detach().to("cpu", torch.int64)
    if positions.ndim == 3 and positions.shape[0] == 4:
        positions = positions[1:]  # text positions first, then time, height, width
    fits = positions.ndim == 2 or (positions.ndim == 3 and positions.shape[0] == 3)
    if not fits or positions.shape[-1] != ids.shape[1] or positions.shape[-2] not in (1, ids.shape[0]):
        raise CaptureError(
            f"position_ids {tuple(position_ids.shape)} do not fit input_ids {tuple(ids.shape)}; "
            "pass [B, T], or [3, B, T] for a multimodal prefix."
        )
    return positions.expand(*positions.shape[:-2], *ids.shape).clone()


def _rope_deltas(model: Any, ids: torch.Tensor) -> torch.Tensor | None:
    """Offset of the next position of each row that holds images or videos, int64 [B]; None for plain text.

    The model keeps the offsets of its latest multimodal prompt on itself, also while it reads plain text
    afterwards, so they are believed only for rows with vision tokens and within what those can cause.
    """
    kinds = [getattr(model.config, name, None) for name in ("image_token_id", "video_token_id")]
    vision = torch.isin(ids, torch.tensor([kind for kind in kinds if kind is not None], dtype=torch.int64))
    if not bool(vision.any()):
        return None
    kept = getattr(getattr(model, "model", None), "rope_deltas", None)
    deltas = kept.detach().to("cpu", torch.int64).reshape(-1) if isinstance(kept, torch.Tensor) else None
    if deltas is None or deltas.shape[0] != ids.shape[0]:
        deltas = torch.ones(ids.shape[0], dtype=torch.int64)  # images never move positions forward
    deltas = deltas.masked_fill(~vision.any(-1), 0)
    if bool(((deltas > 0) | (-deltas >= vision.sum(-1).clamp(min=1))).any()):
        raise CaptureError(
            "The model's rope_deltas are not of this prefix; capture right after its forward pass, or pass "
            "position_ids [3, B, T]."
        )
    return deltas
