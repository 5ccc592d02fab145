"""Continue from a state: forward passes and generation that read new tokens only.

Positions and masks come from the state's bookkeeping, so that nothing about the prefix has to be said again.
Every result reports how many prefix tokens the model processed, counted at its embedding; it is 0.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from statebridge.capture.capture import bookkeeping_for, restore
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
    """

    logits: torch.Tensor
    cache: DynamicCache
    bookkeeping: Bookkeeping
    new_tokens_processed: int
    prefix_tokens_processed: int
    missing: frozenset[str] = frozenset()
    differentiable: bool = False

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
    cache
        The cache that `generate` filled.
    bookkeeping
        Of all tokens read; None after beam search or where a row read padding.
    """

    new_ids: torch.Tensor
    output: Any
    new_tokens_processed: int
    prefix_tokens_processed: int
    cache: DynamicCache
    bookkeeping: Bookkeeping | None

    def state(self) -> HybridState:
        """Capture the model's state after all that it read, which is everything but the last generated token.

        Raises
        ------
        CaptureError
            After beam search, or when a row ended before the others and went on reading padding.
        """
        if self.bookkeeping is None:
            raise CaptureError(
                "After beam search, or when a row ended before the others and read padding, the cache is that of "
                "no row; generate without beams, and such rows one by one."
            )
        layers = read_cache(self.cache, self.bookkeeping.model.layers)
        return HybridState(layers, self.bookkeeping).validate()


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
    next_ids = _checked(next_ids, state.bookkeeping)
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
    next_ids = _checked(next_ids, state.bookkeeping)
    config = options.get("generation_config") or model.generation_config
    _check_options(options, config)
    if "K" in state.missing:
        raise CaptureError(
            "generate reads a prefix without K again; use continue_from for a state without K."
        )
    read_before = 0
    if profile(model).rule.single_step and next_ids.shape[1] > 1:
        live = continue_from(model, state, next_ids[:, :-1], allow_partial=allow_partial)
        state, next_ids, read_before = live.state(), next_ids[:, -1:], live.new_tokens_processed
    beams = options.get("num_beams", config.num_beams) or 1
    returned = options.get("num_return_sequences", config.num_return_sequences) or 1
    # generate expands ids and mask to one row per beam, but leaves a given cache as it is
    cache = restore(state.repeat(max(beams, returned)), model, allow_partial=allow_partial)
    grown = state.bookkeeping.extended(next_ids)
    # generate slices off the positions of the new tokens, so old ones that are not known may be anything
    positions = grown.next_position[:, None] - torch.arange(grown.length, 0, -1)
    device = model.get_input_embeddings().weight.device
    options.setdefault("return_dict_in_generate", True)
    with count_tokens(model) as count:
        output = model.generate(
            grown.token_ids.to(device),
            attention_mask=grown.pad_mask.long().to(device),
            position_ids=positions.to(device),
            use_cache=True,
            **{cache_keyword(model): cache},
            **options,
        )
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    # after the given tokens, every pass reads the one token that it has just produced
    reread = max(count.passes[0] - next_ids.shape[1], 0) + sum(n - 1 for n in count.passes[1:])
    new_ids = sequences[:, grown.length :]
    book = _book_after(grown, new_ids.cpu(), options, config) if beams == 1 else None
    return Generation(new_ids, output, read_before + count.per_row, reread, cache, book)


def _book_after(
    grown: Bookkeeping, new_ids: torch.Tensor, options: dict[str, Any], config: Any
) -> Bookkeeping | None:
    """Bookkeeping after `new_ids` [B·R, N] were generated one by one, the last of them unread."""
    read, rows = new_ids[:, :-1], new_ids.shape[0]
    ends = [options.get(name, getattr(config, name, None)) for name in ("pad_token_id", "eos_token_id")]
    ends = [token for end in ends if end is not None for token in torch.as_tensor(end).reshape(-1).tolist()]
    if rows > 1 and bool(torch.isin(read, torch.tensor(ends, dtype=torch.int64)).any()):
        return None  # generate stops when the last row ends, so a single row never reads padding
    repeats = torch.arange(grown.batch_size).repeat_interleave(rows // grown.batch_size)
    book, schedule = grown.select(repeats), (*grown.schedule, *(1,) * read.shape[1])
    return dataclasses.replace(book.extended(read), schedule=schedule)


def _checked(next_ids: torch.Tensor, book: Bookkeeping) -> torch.Tensor:
    """`next_ids` as int64 [B, N] on the CPU."""
    if next_ids.ndim != 2 or next_ids.shape[0] != book.batch_size or next_ids.shape[1] == 0:
        raise CaptureError(
            f"next_ids {tuple(next_ids.shape)} must be [{book.batch_size}, N] with at least one token a row."
        )
    if next_ids.is_floating_point():
        raise CaptureError(f"next_ids must be integers, found {next_ids.dtype}.")
    return next_ids.detach().to("cpu", torch.int64)


def _check_options(options: dict[str, Any], config: Any) -> None:
    for name in ("input_ids", "inputs", "inputs_embeds", "attention_mask", "position_ids"):
        if name in options:
            raise CaptureError(f"The option {name} follows from the state; leave it out.")
    for name in (
        "cache",
        "past_key_values",
        "cache_implementation",
        "assistant_model",
        "prompt_lookup_num_tokens",
        "prefill_chunk_size",
    ):
        if options.get(name, getattr(config, name, None)) is not None:
            raise CaptureError(f"The option {name} needs a cache of its own or a roll-back; leave it out.")
    if not options.pop("use_cache", True):
        raise CaptureError("use_cache=False would read the prefix again; leave it out.")


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
    with count_tokens(model) as count, torch.inference_mode(False), torch.set_grad_enabled(grad):
        output = model(
            input_ids=new_ids.to(device),
            attention_mask=live.bookkeeping.pad_mask.long().to(device) if masked else None,
            position_ids=positions.to(device),
            use_cache=True,
            logits_to_keep=int(last_only),
            **{cache_keyword(model): live.cache},
        )
    if cache_of(output) is not live.cache:
        raise CaptureError("The model replaced the cache it was given, so its state cannot be followed.")
    return output.logits, count
