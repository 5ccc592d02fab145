"""Free-running generation: how long does a hand-over write what the native receiver would have written?

Every arm starts after the bridge token and reads its own tokens from there, greedily and by seeded sampling.
Sampling uses common random numbers: token = argmax(logits / temperature − log e) with e exponential (the Gumbel
trick), e drawn from the seed, the document and the step alone. Two arms with the same logits then draw the same
token, so that any difference is one of state and none of luck. End-of-text tokens do not stop it.

Common random numbers: Glasserman and Yao (1992). Gumbel trick: Maddison, Tarlow and Minka (2014).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import torch

from statebridge.bridge import Bridge, ModelPair, TokenWindow
from statebridge.capture import Continuation, continue_from, prefill
from statebridge.evaluate.arms import Protocol, handovers, read_prefix
from statebridge.evaluate.config import GenerationConfig

MODES = ("greedy", "sampled")
Choose = Callable[[torch.Tensor], torch.Tensor]


def generation_table(
    pair: ModelPair,
    windows: Sequence[TokenWindow],
    protocol: Protocol,
    config: GenerationConfig,
    *,
    bridge: Bridge,
    seed: int,
) -> pa.Table:
    """Let every arm continue a batch of documents.

    Parameters
    ----------
    pair, bridge
        The models and their bridge.
    windows
        Documents, at least two, so that each has another's state as its wrong donor.
    protocol
        Lengths; the targets are not read.
    config
        Number of tokens and temperature.
    seed
        Of the random numbers.

    Returns
    -------
    pyarrow.Table
        Columns document, mode, arm, tokens (a list of token ids) and text.
    """
    ids = torch.stack([window.ids for window in windows])
    fed = ids[:, protocol.prefix : protocol.prefix + 1]
    hand, its_bridge = next(iter(handovers(bridge).items()))
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        read = read_prefix(pair, ids, protocol)
        states = {
            "native": (pair.receiver, read.native.state()),
            hand: (pair.receiver, its_bridge(read.source)),
            "source": (pair.source, read.source),
            "wrong donor": (
                pair.receiver,
                its_bridge(read.source.select(torch.arange(len(ids)).roll(1))),
            ),
        }
        for mode in MODES:
            for arm in (*states, "empty"):
                model, state = states.get(arm, (pair.receiver, None))
                first = prefill(model, fed) if state is None else continue_from(model, state, fed)
                choose = (
                    _greedy
                    if mode == "greedy"
                    else _Sampler([w.id for w in windows], seed, config.temperature)
                )
                tokens = write_on(model, first, choose, config.new_tokens).tolist()
                rows += [
                    {
                        "document": window.id,
                        "mode": mode,
                        "arm": arm,
                        "tokens": row,
                        "text": pair.tokenizer.decode(row),
                    }
                    for window, row in zip(windows, tokens, strict=True)
                ]
    return pa.Table.from_pylist(rows)


def write_on(model: Any, first: Continuation, choose: Choose, count: int) -> torch.Tensor:
    """Generate `count` tokens [B, count] from a live continuation, one at a time.

    Parameters
    ----------
    model
        The model of `first`.
    first
        Its last logits choose the first token; its cache goes on in place.
    choose
        Logits [B, vocab] to token ids [B].
    count
        Number of tokens, at least 1.
    """
    live, tokens = first, [choose(first.logits[:, -1])]
    while len(tokens) < count:
        live = continue_from(model, live, tokens[-1][:, None])
        tokens.append(choose(live.logits[:, -1]))
    return torch.stack(tokens, dim=1)  # [B, count]


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1).cpu()


class _Sampler:
    """Sample by common random numbers; every call is one step further in each document's own stream."""

    def __init__(self, documents: Sequence[str], seed: int, temperature: float) -> None:
        self.temperature = temperature
        self.streams = [torch.Generator().manual_seed(_stream(seed, name)) for name in documents]

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        vocabulary = logits.shape[-1]
        drawn = [
            torch.empty(vocabulary, dtype=torch.float64).exponential_(generator=stream)
            for stream in self.streams
        ]
        return (logits.double().cpu() / self.temperature - torch.stack(drawn).log()).argmax(-1)


def _stream(seed: int, document: str) -> int:
    digest = hashlib.sha256(f"generation:{seed}:{document}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
