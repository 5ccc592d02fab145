"""Two return tests of the reference pair: exact on the source, and by meaning across a hand-over.

Sixteen conversations side by side read 1,024 tokens of a book with facts woven in, one of which will be asked for,
64 to 900 tokens back. Knows the reference pair; the cases are those of `statebridge.sessions.conformance` and some
of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoTokenizer

import statebridge
from experiments.fingerprint import chat
from statebridge.evaluate.recall import RecallItem, RecallTask
from statebridge.sessions import Buffer
from statebridge.sessions.conformance import (
    EXCURSIONS,
    IMPOSTORS,
    Altered,
    AnotherProcess,
    Drifted,
    Verdict,
    conform,
)
from statebridge.state import HybridState

LENGTH, DEPTHS, PER_DEPTH = 1024, (64, 256, 512, 900), 4
#: Share of the known facts that a translated session may lose and still count as the same.
MEANING = 0.5


def exact_returns(books: Path, source: str, receiver: str, bridge: Path) -> Verdict:
    """The source against itself: logits and sampled tokens; nothing less than equality returns."""
    here, there, elsewhere = _sessions(books, source)
    return conform(
        functools.partial(chat.Chat, source),
        functools.partial(chat.anchor, prefixes=_prefixes(here), seed=1),
        functools.partial(chat.exact, items=here),
        chat.apart,
        other=functools.partial(chat.anchor, prefixes=_prefixes(there), seed=2),
        earlier=functools.partial(chat.anchor, prefixes=_prefixes(here)[:, :-1], seed=1),
        wander=functools.partial(chat.wander, ids=elsewhere),
        impostors=(
            *IMPOSTORS,
            Drifted(scale=1e-4, name="a state drifted by 0.01 %"),
            Altered("another model's state", functools.partial(_of_another, receiver, _prefixes(here))),
        ),
    )


def meaning_after_handover(books: Path, source: str, receiver: str, bridge: Path) -> Verdict:
    """The receiver that read the prefix itself, against itself returned and against the source handed over.

    The outcome is which facts are answered; the distance is the share of known facts that were lost.
    """
    here, there, elsewhere = _sessions(books, source)
    handed = chat.HandedOver(source, statebridge.Bridge.from_pretrained(bridge))
    return conform(
        functools.partial(chat.Chat, receiver),
        functools.partial(chat.anchor, prefixes=_prefixes(here), seed=1),
        functools.partial(chat.meaning, items=here),
        chat.lost,
        MEANING,
        other=functools.partial(chat.anchor, prefixes=_prefixes(there), seed=2),
        earlier=functools.partial(chat.anchor, prefixes=_prefixes(here)[:, : LENGTH - 600], seed=1),
        wander=functools.partial(chat.wander, ids=elsewhere),
        excursions=(*(each for each in EXCURSIONS if not isinstance(each, AnotherProcess)), handed),
        impostors=(
            # greedy answers draw nothing, so a wrong random state has the right meaning
            *(each for each in IMPOSTORS if each.name not in ("a wrong random state", "a drifted state")),
            Drifted(scale=1.0, name="the receiver's state, drifted"),
            chat.WrongTranslation("handed over, then drifted", handed, _drifted),
            chat.WrongTranslation("handed over, heads of K and R exchanged", handed, _exchanged),
            chat.WrongTranslation("handed over, another row's state", handed, _next_row),
        ),
    )


def _sessions(books: Path, source: str) -> tuple[list[RecallItem], list[RecallItem], torch.Tensor]:
    """Questions of two sessions and, for the excursion, other text for every row [B, 200]."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    texts = [file.read_text(encoding="utf-8")[20_000:] for file in sorted(books.glob("*.txt"))[:6]]
    here, there = (
        list(RecallTask(tokenizer, texts[:5], LENGTH, DEPTHS, PER_DEPTH, seed=seed).items())
        for seed in (1, 2)
    )
    elsewhere = torch.tensor([tokenizer.encode(texts[5][:2000])[:200]])
    return here, there, elsewhere.repeat(len(here), 1)


def _prefixes(items: list[RecallItem]) -> torch.Tensor:
    return torch.tensor([item.prefix_ids for item in items])


def _of_another(folder: str, prefixes: torch.Tensor, buffers: tuple[Buffer, ...]) -> Iterable[Buffer]:
    """Tensors of another model that read the same, under this session's header."""
    strange = chat.Chat(folder)
    strange.read(prefixes)
    named = {buffer.name: buffer for buffer in strange.buffers() if buffer.name.startswith("layers.")}
    return [named.get(buffer.name, buffer) for buffer in buffers]


def _drifted(state: HybridState) -> HybridState:
    generator = torch.Generator().manual_seed(0)
    return state.map(lambda _, t: t + t.std() * torch.randn(t.shape, generator=generator))


def _exchanged(state: HybridState) -> HybridState:
    """Heads in reverse order, as a bridge with the wrong layout leaves them."""
    return state.map(lambda field, tensor: tensor if field == "conv_state" else tensor.flip(1))


def _next_row(state: HybridState) -> HybridState:
    """Every row with the next one's memory: right model, wrong conversation."""
    rolled = state.select(torch.arange(state.batch_size).roll(1))
    return dataclasses.replace(rolled, bookkeeping=state.bookkeeping)
