"""The arms of an evaluation: one condition each, scored on the same true tokens.

Protocol: the source reads x_1 … x_L. The receiver's first input is the true next token x_{L+1} (the bridge
token); its logits predict the first of P scored, teacher-forced targets x_{L+2} … x_{L+1+P}. No prefix is
replayed. Arms:

    native            the receiver reads the prefix itself
    source            the source continues its own prefix
    empty             the receiver without any prefix
    restore           the receiver's own state, captured and restored (must equal native)
    window W          the receiver reads only the last W prefix tokens itself
    a plan, say TDD   the source's state through the bridge under that plan
    handover + W      the state of x_1 … x_{L−W} handed over, the last W prefix tokens read by the receiver
    kv only           the bridge's keys and values alone, R and C left uninitialised
    gdn only          its R and C alone
    wrong donor       the hand-over with the state of another document of equal length
    calibrated        a bridge with a calibrator: its plan, then the calibrator; the plan alone is an arm too

The hand-over is the bridge as it is: the arm "calibrated" where it has a calibrator, that of its plan where not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from statebridge.bridge import Bridge, ModelPair
from statebridge.capture import Continuation, continue_from, prefill
from statebridge.errors import DocumentError
from statebridge.state import HybridState
from statebridge.stats import token_agreement


@dataclass(frozen=True)
class Protocol:
    """Lengths of an evaluation, in tokens.

    Attributes
    ----------
    prefix
        Prefix length L.
    targets
        Scored positions P.
    """

    prefix: int = 4096
    targets: int = 64

    @property
    def length(self) -> int:
        """Tokens of one document: the prefix, one bridge token, the targets."""
        return self.prefix + 1 + self.targets


@dataclass(frozen=True)
class ArmScores:
    """Scores of one arm, each [B, P]; agreement is with the native arm.

    Attributes
    ----------
    nll
        Negative log-likelihood of the true token, nats.
    top1
        1 where the most likely token is the native one's, else 0.
    kl, js
        Divergence of the full next-token distribution from the native one, nats.
    """

    nll: torch.Tensor
    top1: torch.Tensor
    kl: torch.Tensor
    js: torch.Tensor


@dataclass(frozen=True)
class PrefixStates:
    """What both models hold after a batch of prefixes: the live receiver and a state of the source."""

    source: HybridState
    native: Continuation


def handovers(bridge: Bridge, plans: Sequence[str] = ()) -> dict[str, Bridge]:
    """Arm -> bridge of every hand-over: the bridge as it is first, then its plan and `plans` uncalibrated.

    Raises
    ------
    StateMismatch
        When a plan copies between unequal shapes or translates what was not fitted.
    """
    first = {} if bridge.calibrator is None else {"calibrated": bridge}
    return first | {plan: bridge.with_plan(plan) for plan in dict.fromkeys((bridge.config.plan, *plans))}


def batches(count: int, size: int) -> list[tuple[int, int]]:
    """First and last (exclusive) of each batch; a last row of its own joins the batch before it.

    Alone in a batch, it would have no other's state as its wrong donor.
    """
    starts = list(range(0, count, size))
    if len(starts) > 1 and count - starts[-1] == 1:
        starts.pop()
    return list(zip(starts, [*starts[1:], count], strict=True))


def read_prefix(pair: ModelPair, ids: torch.Tensor, protocol: Protocol) -> PrefixStates:
    """Let both models read the prefixes of `ids` [B, L + 1 + P].

    Raises
    ------
    DocumentError
        When `ids` is not as long as the protocol needs.
    """
    if ids.ndim != 2 or ids.shape[1] != protocol.length:
        raise DocumentError(
            f"The protocol needs documents of {protocol.length} tokens, found {tuple(ids.shape)}; cut them so."
        )
    prefix = ids[:, : protocol.prefix]
    with torch.inference_mode():
        return PrefixStates(prefill(pair.source, prefix).state(), prefill(pair.receiver, prefix))


def arm_logits(
    pair: ModelPair,
    ids: torch.Tensor,
    protocol: Protocol,
    *,
    bridge: Bridge,
    plans: Sequence[str] = (),
    windows: Sequence[int] = (),
    handover_windows: Sequence[int] = (),
    controls: Sequence[str] = ("source", "empty", "kv only", "wrong donor"),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (arm, logits [B, P, vocab]) for a batch of documents, native first.

    Parameters
    ----------
    pair, bridge
        The models and their bridge.
    ids
        Token ids [B, L + 1 + P].
    protocol
        Lengths.
    plans
        Plans to score besides the bridge's own; the hand-over comes first.
    windows
        W of each truncated read by the receiver without a state.
    handover_windows
        W of each hand-over after which the receiver reads the last W prefix tokens itself: the same cost for
        the receiver as the truncated read of W, so that the two can be compared.
    controls
        Which of "source", "empty", "restore", "kv only", "gdn only", "wrong donor" to score. A wrong donor
        needs at least two documents in the batch.
    """
    read = read_prefix(pair, ids, protocol)
    fed = ids[:, protocol.prefix : protocol.prefix + protocol.targets]
    # the native continuation changes its cache in place, so what others need of it is captured first
    own = read.native.state() if "restore" in controls else None
    bridges = handovers(bridge, plans)
    with torch.inference_mode():
        yield "native", continue_from(pair.receiver, read.native, fed).logits
        if own is not None:
            yield "restore", continue_from(pair.receiver, own, fed).logits
        if "source" in controls:
            yield "source", continue_from(pair.source, read.source, fed).logits
        if "empty" in controls:
            yield "empty", _plain(pair.receiver, fed, protocol)
        for window in windows:
            kept = ids[:, protocol.prefix - window : protocol.prefix + protocol.targets]
            yield f"window {window}", _plain(pair.receiver, kept, protocol)
        for arm, its_bridge in bridges.items():
            yield arm, continue_from(pair.receiver, its_bridge(read.source), fed).logits
        for window in handover_windows:
            cut = protocol.prefix - window
            state = bridge(prefill(pair.source, ids[:, :cut]).state())
            live = continue_from(pair.receiver, state, ids[:, cut : protocol.prefix], last_logits_only=True)
            yield f"handover + {window}", continue_from(pair.receiver, live, fed).logits
        if "kv only" in controls:
            state = bridge(read.source).without("R", "C")
            yield "kv only", continue_from(pair.receiver, state, fed, allow_partial=True).logits
        if "gdn only" in controls:
            state = bridge(read.source).without("K")
            yield "gdn only", continue_from(pair.receiver, state, fed, allow_partial=True).logits
        if "wrong donor" in controls and len(ids) > 1:
            donors = read.source.select(torch.arange(len(ids)).roll(1))
            yield "wrong donor", continue_from(pair.receiver, bridge(donors), fed).logits
            plan = bridge.config.plan
            if "calibrated" in bridges:
                yield f"wrong donor {plan}", continue_from(pair.receiver, bridges[plan](donors), fed).logits


def score(logits: torch.Tensor, native: torch.Tensor, targets: torch.Tensor) -> ArmScores:
    """Score logits [B, P, vocab] on true tokens [B, P], and against the native logits."""
    logits = logits.to(native.device)  # source and receiver may live on different devices
    log_p = torch.log_softmax(logits.float(), dim=-1)
    nll = -log_p.gather(-1, targets.to(logits.device)[..., None]).squeeze(-1)
    agreement = token_agreement(native, logits)
    parts = (nll, agreement.top1, agreement.kl, agreement.js)
    return ArmScores(*(torch.as_tensor(part).float().cpu() for part in parts))


def score_arms(
    pair: ModelPair, ids: torch.Tensor, protocol: Protocol, *, bridge: Bridge, **options: Any
) -> Mapping[str, ArmScores]:
    """Score every arm of `arm_logits` on a batch of documents [B, L + 1 + P]."""
    targets = ids[:, protocol.prefix + 1 :]
    scores: dict[str, ArmScores] = {}
    native: torch.Tensor | None = None
    for arm, logits in arm_logits(pair, ids, protocol, bridge=bridge, **options):
        native = logits if native is None else native
        scores[arm] = score(logits, native, targets)
    return scores


def _plain(model: Any, ids: torch.Tensor, protocol: Protocol) -> torch.Tensor:
    """Logits of the last P of `ids` [B, n ≥ P], read from nothing."""
    before = ids.shape[1] - protocol.targets
    if before:
        live = prefill(model, ids[:, :before])
        return continue_from(model, live, ids[:, before:]).logits
    first = prefill(model, ids[:, :1])
    rest = continue_from(model, first, ids[:, 1:])
    return torch.cat((first.logits, rest.logits), dim=1)
