"""The fingerprint of a language model: `CacheRuntime` at several lengths, its buffers grouped by what they are.

Knows torch and token ids; which text is read is the caller's choice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from statebridge.sessions.fingerprint.distances import mean_divergence
from statebridge.sessions.fingerprint.fingerprint import Fingerprint
from statebridge.sessions.fingerprint.language import ATTENTION, FLAGS, CacheRuntime, place_of
from statebridge.sessions.session import BufferSpec


def by_component(spec: BufferSpec) -> str:
    """Group the buffers of all layers by what they are: key, value, recurrent_state, conv_state, flags."""
    place = place_of(spec.name)
    if place is None:
        return spec.name
    return "flags" if place[1] in FLAGS else place[1]


def by_layer(spec: BufferSpec) -> str:
    """Group keys with values, and recurrent with convolution states and flags, per layer: `layers.3.attention`."""
    place = place_of(spec.name)
    if place is None:
        return spec.name
    return f"layers.{place[0]}.{'attention' if place[1] in ATTENTION else 'recurrent'}"


def fingerprint_model(
    model: Any,
    windows: torch.Tensor,
    lengths: Sequence[int],
    distance: Callable[[Any, Any], float] = mean_divergence,
    eps: float = 1e-6,
    *,
    group: Callable[[BufferSpec], str] = by_component,
    derive: bool = False,
) -> Fingerprint:
    """What a language model needs to go on, at several lengths of what it has read.

    Two rows side by side, the second padded by a quarter, so that masks and positions have work to do; two more are
    the other session. The outcome is the logits of the tokens after the prefixes.

    Parameters
    ----------
    model
        A causal language model of transformers.
    windows
        Token ids int64 [4, T + N]: the longest prefix and N tokens after it; shorter prefixes are its last tokens.
    lengths
        Tokens read, each at least 4; the largest is T.
    distance, eps, group
        As in `Fingerprint.discover`; the default distance is in nats per token.
    derive
        Allow reading the tokens again.
    """
    prefixes, after = windows[:, : max(lengths)], windows[:2, max(lengths) :]

    def anchors(rows: torch.Tensor) -> dict[int, Callable[[CacheRuntime], object]]:
        return {n: functools.partial(_read_padded, ids=rows[:, -n:]) for n in lengths}

    return Fingerprint.discover(
        functools.partial(CacheRuntime, model, 2),
        anchors(prefixes[:2]),
        lambda runtime: runtime.read(after).float().cpu().numpy(),
        distance,
        eps,
        other=anchors(prefixes[2:]),
        group=group,
        derive=derive,
    )


def _read_padded(runtime: CacheRuntime, ids: torch.Tensor) -> None:
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, : ids.shape[1] // 4] = False
    runtime.read(ids, mask)
