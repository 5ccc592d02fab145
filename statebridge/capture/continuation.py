"""Continue from a state: forward passes and generation that read new tokens only.

Positions and masks come from the state's bookkeeping, so that nothing about the prefix has to be said again.
Every result reports how many prefix tokens the model processed, counted at its embedding; it is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from statebridge.capture.capture import check_padding, restore
from statebridge.capture.model import backend_of, cache_keyword, cache_of, profile, text_config
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
    """

    logits: torch.Tensor
    cache: DynamicCache
    bookkeeping: Bookkeeping
    new_tokens_processed: int
    prefix_tokens_processed: int
    missing: frozenset[str] = frozenset()

    def state(self) -> HybridState:
        """Capture the state as it is now."""
        layers = read_cache(self.cache, self.bookkeeping.model.layers)
        return HybridState(layers, self.bookkeeping).validate()


@dataclass(frozen=True)
class Generation:
    """Tokens generated from a state.

    Attributes
    ----------
    new_ids
        Generated tokens [B·R, N] after the given ones, padded as `generate` pads; R returned sequences a row.
    output
        What transformers' `generate` returned, with `sequences` [B·R, T + given + N].
    new_tokens_processed, prefix_tokens_processed
        Tokens per row that the model read, counted at its embedding.
    """

    new_ids: torch.Tensor
    output: Any
    new_tokens_processed: int
    prefix_tokens_processed: int


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
    facts = profile(model)
    ids = input_ids.detach().to("cpu", torch.int64)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        mask = attention_mask.detach().to("cpu").bool()
    layout = facts.rule.conv_layout(text_config(model))
    check_padding(mask, recurrent=bool(layout))
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    book = Bookkeeping(
        token_ids=ids.clone(),
        pad_mask=mask.clone(),
        positions=positions,
        next_position=positions[:, -1] + 1,
        model=facts.identity,
        tokenizer=tokenizer,
        schedule=(ids.shape[1],),
        conv_layout=layout,
        recurrent_axes=facts.rule.recurrent_axes,
        backend=backend_of(model),
    )
    cache = new_cache(model)
    logits, count = _forward(model, cache, ids, book, positions, logits_to_keep=1)
    return Continuation(logits, cache, book, count.per_row, count.prefix_tokens(ids.shape[1]))


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
    book = state.bookkeeping
    _check_next(next_ids, book)
    if isinstance(state, Continuation):
        cache, missing = state.cache, state.missing
    else:
        cache = restore(state, model, allow_partial=allow_partial, differentiable=differentiable)
        missing = frozenset(state.missing)
    widths = [1] * next_ids.shape[1] if profile(model).rule.single_step else [next_ids.shape[1]]
    logits, processed = [], 0
    for piece in next_ids.split(widths, dim=1):
        positions = book.next_position[:, None] + torch.arange(piece.shape[1])
        book = book.extended(piece)
        piece_logits, count = _forward(model, cache, piece, book, positions, int(last_logits_only))
        logits.append(piece_logits)
        processed += count.per_row
    new = next_ids.shape[1]
    joined = logits[-1] if last_logits_only or len(logits) == 1 else torch.cat(logits, dim=1)
    return Continuation(joined, cache, book, processed, max(processed - new, 0), missing)


def generate_from(
    model: Any,
    state: HybridState,
    next_ids: torch.Tensor,
    *,
    allow_partial: bool = False,
    **options: Any,
) -> Generation:
    """Generate after the prefix of `state` and `next_ids`, with any option of transformers' `generate`.

    Parameters
    ----------
    model
        The model that continues.
    state
        Its state, which stays as it is.
    next_ids
        Tokens [B, N], N ≥ 1, that the model reads before it generates.
    allow_partial
        As in `restore`.
    **options
        Passed to `generate`: sampling, beams, stop strings, streamers, logits processors, … The processors
        see the whole sequence, prefix included.

    Returns
    -------
    Generation
        The new tokens and the count of prefix tokens processed.

    Raises
    ------
    CaptureError
        When `next_ids` does not fit the state or an option asks for another cache.
    StateMismatch
        When the state does not belong to the model.
    """
    book = state.bookkeeping
    _check_next(next_ids, book)
    for name in (
        "cache_implementation",
        "past_key_values",
        "cache",
        "assistant_model",
        "prompt_lookup_num_tokens",
    ):
        if options.get(name) is not None:
            raise CaptureError(
                f"The option {name} needs a cache that can be replaced or rolled back; leave it out."
            )
    read_before = 0
    if profile(model).rule.single_step and next_ids.shape[1] > 1:
        live = continue_from(model, state, next_ids[:, :-1], allow_partial=allow_partial)
        state, book, next_ids = live.state(), live.bookkeeping, next_ids[:, -1:]
        read_before = live.new_tokens_processed
    config = options.get("generation_config", model.generation_config)
    beams = options.get("num_beams", config.num_beams) or 1
    returned = options.get("num_return_sequences", config.num_return_sequences) or 1
    width = max(beams, returned) if beams > 1 or returned > 1 else 1
    # generate expands ids and mask to one row per beam, but leaves a given cache as it is
    cache = restore(state.repeat(width) if width > 1 else state, model, allow_partial=allow_partial)
    device = model.get_input_embeddings().weight.device
    grown = book.extended(next_ids)
    keyword = {cache_keyword(model): cache}
    positions = _all_positions(book, grown)
    options.setdefault("return_dict_in_generate", True)
    with count_tokens(model) as count:
        output = model.generate(
            grown.token_ids.to(device),
            attention_mask=grown.pad_mask.long().to(device),
            position_ids=positions.to(device),
            use_cache=True,
            **keyword,
            **options,
        )
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    new_ids = sequences[:, grown.length :]
    # the last generated token is never read; a finished beam may end earlier
    meant = next_ids.shape[1] + max(count.forward_passes - 1, 0)
    return Generation(new_ids, output, read_before + count.per_row, count.prefix_tokens(meant))


def _check_next(next_ids: torch.Tensor, book: Bookkeeping) -> None:
    if next_ids.ndim != 2 or next_ids.shape[0] != book.batch_size or next_ids.shape[1] == 0:
        raise CaptureError(
            f"next_ids {tuple(next_ids.shape)} must be [{book.batch_size}, N] with at least one token a row."
        )


def _all_positions(book: Bookkeeping, grown: Bookkeeping) -> torch.Tensor:
    """Positions [B, T + N] for `generate`, which slices off the new ones; unknown old ones are counted back."""
    if grown.positions is not None and grown.positions.ndim == 2:
        return grown.positions
    return grown.next_position[:, None] - torch.arange(grown.length, 0, -1)


def _forward(
    model: Any,
    cache: DynamicCache,
    new_ids: torch.Tensor,
    grown: Bookkeeping,
    positions: torch.Tensor,
    logits_to_keep: int,
) -> tuple[torch.Tensor, TokenCount]:
    device = model.get_input_embeddings().weight.device
    with count_tokens(model) as count:
        output = model(
            input_ids=new_ids.to(device),
            # a mask over the new tokens alone would be accepted and silently wrong
            attention_mask=grown.pad_mask.long().to(device) if grown.padded else None,
            position_ids=positions.to(device),
            use_cache=True,
            logits_to_keep=logits_to_keep,
            **{cache_keyword(model): cache},
        )
    if cache_of(output) is not cache:
        raise CaptureError("The model replaced the cache it was given, so its state cannot be followed.")
    return output.logits, count
