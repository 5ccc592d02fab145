"""Generate from a state, with every way of transformers' `generate` that can go on from a given cache.

`generate` is given the full ids, of which it reads only those that the cache does not hold; its logits
processors and stopping criteria see the whole sequence.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from statebridge.capture.capture import restore
from statebridge.capture.continuation import checked_next, continue_from
from statebridge.capture.kernels import runnable_kernels
from statebridge.capture.model import cache_keyword, profile
from statebridge.capture.tokens import count_tokens
from statebridge.capture.walker import read_cache
from statebridge.errors import CaptureError
from statebridge.state import Bookkeeping, HybridState


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


def generate_from(
    model: Any,
    state: HybridState,
    next_ids: torch.Tensor,
    *,
    allow_partial: bool = False,
    consume: bool = False,
    **options: Any,
) -> Generation:
    """Generate after the prefix of `state` and `next_ids`, with any option of transformers' `generate`.

    Parameters
    ----------
    model
        The model that continues.
    state
        Its state, which stays as it is, unless `consume` gives its memory to the cache.
    next_ids
        Tokens [B, N], N ≥ 1, that the model reads before it generates.
    allow_partial, consume
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
        When the state does not belong to the model, or is spent.
    """
    next_ids = checked_next(next_ids, state.validate().bookkeeping)
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
    rows = max(beams, returned)
    cache = restore(
        state.repeat(rows) if rows > 1 else state,
        model,
        allow_partial=allow_partial,
        consume=consume or rows > 1,
    )
    grown = state.bookkeeping.extended(next_ids)
    # generate slices off the positions of the new tokens, so old ones that are not known may be anything
    device = model.get_input_embeddings().weight.device
    steps = torch.arange(grown.length, 0, -1, device=device)
    positions = grown.next_position.to(device)[:, None] - steps
    options.setdefault("return_dict_in_generate", True)
    with count_tokens(model) as count, runnable_kernels(model):
        output = model.generate(
            grown.token_ids.to(device),
            attention_mask=grown.pad_mask.to(device).long(),
            position_ids=positions,
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
