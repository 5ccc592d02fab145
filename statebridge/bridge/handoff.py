"""Hand a prompt from the source to the receiver: read, capture, translate, continue.

The source reads all of the prompt but its last tokens (or has read it already: `state`), the bridge translates
its state, the receiver reads the bridge tokens that are left and generates. The receiver never reads a prefix
token, and the reply says so with a count. Every tensor is moved once: the bridge reads the source's cache where it
lies, and what it makes becomes the receiver's cache.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from statebridge.bridge.pair import tokenizer_digest
from statebridge.capture import Continuation, Generation, generate_from, prefill
from statebridge.errors import DocumentError, StateMismatch
from statebridge.state import Component, HybridState

if TYPE_CHECKING:
    from statebridge.bridge.bridge import Bridge
    from statebridge.bridge.pair import ModelPair

Prompt = str | Sequence[Mapping[str, str]] | torch.Tensor


@dataclass(frozen=True)
class Reply:
    """What came back from a hand-over.

    Attributes
    ----------
    text, new_ids
        The receiver's continuation as text without special tokens, and as token ids [R, N] for R returned
        sequences, of which the text is the first.
    prefix_tokens, bridge_tokens
        Tokens whose state was handed over, and tokens that the receiver read itself.
    prefix_tokens_processed
        Prefix tokens that the receiver read, counted at its embedding: 0.
    seconds
        Time of each step: "source_prefill" (0 with a given state), "capture", "translate", "first_token"
        (install, read the bridge tokens, choose a token) and "generate" (all of the generation).
    moved_bytes
        Bytes of each component that went from source to receiver.
    plan
        The bridge's plan.
    output
        What transformers' `generate` returned.
    """

    text: str
    new_ids: torch.Tensor
    prefix_tokens: int
    bridge_tokens: int
    prefix_tokens_processed: int
    seconds: Mapping[str, float]
    moved_bytes: Mapping[Component, int]
    plan: str
    output: Any


def handoff(
    pair: ModelPair,
    prompt: Prompt,
    *,
    bridge: Bridge,
    state: HybridState | Continuation | Generation | None = None,
    bridge_tokens: int = 1,
    **generation: Any,
) -> Reply:
    """Let the source read the prompt and the receiver continue it.

    Parameters
    ----------
    pair
        The models and their tokenizer.
    prompt
        Text, chat messages (role and content, put through the tokenizer's chat template) or token ids [1, T].
        With `state`, the whole prompt all the same: the state's tokens must be its beginning.
    bridge
        A bridge of this pair.
    state
        State of the source after a first part of the prompt: a state, a `Continuation`, or the `Generation` of
        an earlier turn. Without it, the source reads the prompt now.
    bridge_tokens
        Tokens that the receiver reads itself (at least 1); with `state`, whatever follows the state.
    **generation
        Any option of transformers' `generate`: `max_new_tokens`, `do_sample`, `stop_strings`, `streamer`, …

    Raises
    ------
    DocumentError
        When the prompt is too short to be split, or does not begin with the state's tokens.
    StateMismatch
        When the bridge was not fitted for these models.
    """
    if bridge_tokens < 1:
        raise DocumentError(
            "The receiver must read at least one bridge token; its logits predict the first new one."
        )
    bridge.config.receiver.require(
        pair.receiver_identity, "this bridge leads to another receiver", "Use a bridge fitted for this pair."
    )
    ids = _prompt_ids(pair.tokenizer, prompt)
    digest = tokenizer_digest(pair.tokenizer)
    seconds: dict[str, float] = {"source_prefill": 0.0}
    clock = _Clock(pair)
    if state is None:
        if ids.shape[1] <= bridge_tokens:
            raise DocumentError(
                f"The prompt has {ids.shape[1]} tokens; it needs more than the {bridge_tokens} bridge tokens."
            )
        with torch.inference_mode():
            state = prefill(pair.source, ids[:, :-bridge_tokens], tokenizer=digest)
        seconds["source_prefill"] = clock.lap()
    if isinstance(state, Continuation):
        state = state.state(borrow=True)  # the bridge copies it, and the source does not go on before
    elif isinstance(state, Generation):
        state = state.state()
    seconds["capture"] = clock.lap()
    rest, prefix_tokens = _after(ids, state), int(state.seen_tokens[0])
    translated = bridge(state)
    moved_bytes = translated.nbytes()
    del state  # where it was read here, its memory is free now
    seconds["translate"] = clock.lap()
    first = _FirstToken(clock)
    processors = [*(generation.pop("logits_processor", None) or []), first]
    generation.setdefault("tokenizer", pair.tokenizer)  # stop strings need it
    with torch.inference_mode():
        result = generate_from(
            pair.receiver, translated, rest, consume=True, logits_processor=processors, **generation
        )
    seconds["generate"] = clock.lap()
    seconds["first_token"] = first.seconds
    new_ids = result.new_ids.cpu()
    return Reply(
        text=pair.tokenizer.decode(new_ids[0], skip_special_tokens=True),
        new_ids=new_ids,
        prefix_tokens=prefix_tokens,
        bridge_tokens=rest.shape[1],
        prefix_tokens_processed=result.prefix_tokens_processed,
        seconds=seconds,
        moved_bytes=moved_bytes,
        plan=bridge.config.plan,
        output=result.output,
    )


def _prompt_ids(tokenizer: Any, prompt: Prompt) -> torch.Tensor:
    if isinstance(prompt, torch.Tensor):
        ids = prompt.reshape(1, -1) if prompt.ndim == 1 else prompt
        if ids.shape[0] != 1:
            raise DocumentError(
                f"A hand-over takes one prompt, found {ids.shape[0]} rows; hand them over one by one."
            )
        return ids.cpu()
    if isinstance(prompt, str):
        return torch.tensor([tokenizer(prompt)["input_ids"]], dtype=torch.int64)
    if not getattr(tokenizer, "chat_template", None):
        raise DocumentError("The tokenizer has no chat template; give the prompt as text.")
    ids = tokenizer.apply_chat_template(
        [dict(message) for message in prompt], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    return torch.tensor([ids], dtype=torch.int64)


def _after(ids: torch.Tensor, state: HybridState) -> torch.Tensor:
    """The prompt's tokens after those of the state."""
    book = state.bookkeeping
    if book.batch_size != 1:
        raise StateMismatch(
            "a hand-over takes one row", {"rows": (1, book.batch_size)}, "Use state.select([row])."
        )
    # numpy, as in the bookkeeping: torch would wake its threads for a long prefix
    seen, given = book.token_ids[0].numpy()[book.pad_mask[0].numpy()], ids[0].numpy()
    if len(given) <= len(seen) or (given[: len(seen)] != seen).any():
        same = min(len(given), len(seen))
        first = int((given[:same] == seen[:same]).cumprod().sum())
        raise DocumentError(
            f"The prompt must begin with the {len(seen)} tokens of the state and go on after them; it agrees "
            f"with the first {first} and has {ids.shape[1]}. Give the whole prompt, or token ids."
        )
    return ids[:, len(seen) :]


class _Clock:
    """Laps of wall time, each after both models' devices have finished their work."""

    def __init__(self, pair: ModelPair) -> None:
        devices = {p.device for model in (pair.source, pair.receiver) for p in model.parameters()}
        self.devices = [device for device in devices if device.type == "cuda"]
        self.start = time.perf_counter()

    def now(self) -> float:
        for device in self.devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def lap(self) -> float:
        now = self.now()
        elapsed, self.start = now - self.start, now
        return elapsed


class _FirstToken:
    """A logits processor that changes nothing and notes when the first token could be chosen."""

    def __init__(self, clock: _Clock) -> None:
        self.clock = clock
        self.seconds = float("nan")

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.seconds != self.seconds:
            self.seconds = self.clock.now() - self.clock.start
        return scores
