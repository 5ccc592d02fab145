"""The restore control: is a state, captured and restored in the same model, the same state?

The model reads a prefix and goes on with its own cache; that is the native side, run without this library's
continuation. A state captured before it went on is restored and continued over the same tokens. Every check
states what it measured and can fail. It knows models only through the capture room.

    restore          top-1 agreement 1 and maximum logit difference 0, contexts × lengths
    counter          no prefix token read, every new token read once
    file             saved and loaded, the state is the same to the last bit and continues so
    forks            two restores share no memory; running one moves neither the other nor the state
    dtypes           what is restored has the dtypes that were captured (R stays float32)
    other weights    a change of one weight matrix is refused      other rotation   likewise, of the frequencies
    partial          a state that lacks a component is refused

Source: the restore control of LatentPort, arXiv 2609.25053 (16 contexts at four lengths).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from statebridge.capture import capture, continue_from
from statebridge.errors import ConfigError, StatebridgeError
from statebridge.evaluate.restore_checks import CHECKS, continued, difference_of, native
from statebridge.state import HybridState

LENGTHS = (128, 512, 1024, 4096)
NEXT_TOKENS = 8


@dataclass(frozen=True)
class Check:
    """One verdict.

    Attributes
    ----------
    name, passed, detail
        What was checked, whether it holds, and what was measured, in words.
    """

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class LengthResult:
    """Restored against native at one prefix length, over all contexts and new tokens."""

    length: int
    contexts: int
    top1: float
    max_difference: float


@dataclass(frozen=True)
class RestoreControl:
    """All verdicts on one model, and the restore figures by length."""

    model_type: str
    checks: tuple[Check, ...]
    lengths: tuple[LengthResult, ...]

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)


@dataclass
class _Seen:
    """Running measurements of one length."""

    agree: list[bool] = field(default_factory=list)
    difference: float = 0.0
    prefix_read: int = 0
    new_read: set[int] = field(default_factory=set)


def restore_control(
    model: Any,
    contexts: torch.Tensor,
    lengths: Sequence[int] = LENGTHS,
    *,
    step: Callable[[], None] = lambda: None,
) -> RestoreControl:
    """Run every check on `model`.

    Parameters
    ----------
    model
        A causal language model of transformers. Two checks change a weight and put it back.
    contexts
        Token ids [contexts, max(lengths) + NEXT_TOKENS].
    lengths
        Prefix lengths.
    step
        Called after each context at each length.

    Raises
    ------
    ConfigError
        When the contexts are shorter than the longest prefix.
    UnsupportedModel
        When the model's state cannot be moved at all.
    """
    if contexts.shape[1] < max(lengths) + NEXT_TOKENS:
        raise ConfigError(
            f"Contexts of {contexts.shape[1]} tokens are too short for lengths {list(lengths)}."
        )
    results, checks, seen_all = [], [], []
    for length in lengths:
        seen = _Seen()
        for row in torch.split(contexts[:, : length + NEXT_TOKENS], 1):
            _compare(model, row, length, seen)
            step()
        seen_all.append(seen)
        top1 = sum(seen.agree) / len(seen.agree)
        results.append(LengthResult(length, len(contexts), top1, seen.difference))
    worst, top1 = max(r.max_difference for r in results), min(r.top1 for r in results)
    checks.append(Check("restore", worst == 0 and top1 == 1, f"top-1 {top1:.2%}, max difference {worst:g}"))
    read = max(seen.prefix_read for seen in seen_all)
    new = set().union(*(seen.new_read for seen in seen_all))
    counted = f"{read} prefix tokens read, {sorted(new)} of {NEXT_TOKENS} new ones"
    checks.append(Check("counter", read == 0 and new == {NEXT_TOKENS}, counted))
    prefix, after = contexts[:1, : min(lengths)], contexts[:1, min(lengths) : min(lengths) + NEXT_TOKENS]
    cache, state = _captured(model, prefix)
    expected = continued(model, state, after)
    for name, check in CHECKS.items():
        try:
            passed, detail = check(model, cache, state, after, expected)
        except StatebridgeError as error:  # a fault may also surface as a refusal of what is right
            passed, detail = False, f"refused: {error}"
        checks.append(Check(name, passed, detail))
    return RestoreControl(state.bookkeeping.model.model_type, tuple(checks), tuple(results))


def _captured(model: Any, prefix: torch.Tensor) -> tuple[Any, HybridState]:
    _, cache = native(model, prefix)
    return cache, capture(model, cache, input_ids=prefix)


def _compare(model: Any, row: torch.Tensor, length: int, seen: _Seen) -> None:
    prefix, after = row[:, :length], row[:, length:]
    cache, state = _captured(model, prefix)
    expected, _ = native(model, after, cache)  # first, so that a state which shares its memory has moved
    got = continue_from(model, state, after)
    seen.difference = max(seen.difference, difference_of(got.logits, expected))
    seen.agree += (got.logits.argmax(-1) == expected.argmax(-1)).flatten().tolist()
    seen.prefix_read = max(seen.prefix_read, got.prefix_tokens_processed)
    seen.new_read.add(got.new_tokens_processed)
