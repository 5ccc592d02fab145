"""A language model as a session that is asked about what it was told: facts stated before it leaves, asked after.

Rows are conversations side by side, each with a fact of its own in its prefix. Two outcomes:

    exact     logits of the questions, then sampled tokens: equal to the last bit, or not
    meaning   which facts are answered by greedy decoding; distance = share of the known facts that were lost
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import statebridge
from statebridge.capture.load import load_model
from statebridge.evaluate.recall import RecallItem, greedy_match
from statebridge.sessions import Buffer, HybridSession
from statebridge.sessions.conformance import Setting
from statebridge.sessions.fingerprint import max_difference


@functools.cache
def model_of(folder: str) -> Any:
    """The model of a folder in float32."""
    return load_model(folder, dtype=torch.float32)[0]


class Chat:
    """A model with a `HybridSession`."""

    def __init__(self, folder: str) -> None:
        self.model = model_of(folder)
        self.session = HybridSession()

    def read(self, ids: torch.Tensor) -> None:
        """Read tokens [B, N]."""
        state = self.session.state
        live = (
            statebridge.prefill(self.model, ids)
            if state is None
            else statebridge.continue_from(self.model, state, ids, last_logits_only=True)
        )
        self.session.state = live.state()

    def buffers(self) -> Iterable[Buffer]:
        """Those of the session."""
        return self.session.buffers()

    def load(self, buffers: Iterable[Buffer]) -> None:
        """Become the session that gave these buffers."""
        self.session.load(buffers)


def anchor(chat: Chat, prefixes: torch.Tensor, seed: int) -> None:
    """Read the prefixes [B, T] and draw a little, so that the random state is the session's own."""
    torch.manual_seed(seed)
    chat.read(prefixes)
    torch.rand(seed + 1)


def wander(chat: Chat, ids: torch.Tensor) -> None:
    """Read something else, and draw."""
    chat.read(ids)
    torch.rand(3)


@torch.inference_mode()
def exact(chat: Chat, items: Sequence[RecallItem]) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the questions [B, N, vocabulary], and eight sampled tokens a row [B, 8]."""
    logits = statebridge.continue_from(chat.model, chat.session.state, asked(items)).logits
    first = torch.tensor([[item.prompt_ids[0]] for item in items])
    drawn = statebridge.generate_from(
        chat.model, chat.session.state, first, max_new_tokens=8, do_sample=True, eos_token_id=None
    )
    return logits.numpy(), drawn.new_ids.numpy()


def apart(one: tuple[np.ndarray, np.ndarray], other: tuple[np.ndarray, np.ndarray]) -> float:
    """Largest difference of a logit, or the share of sampled tokens that differ, whichever is more."""
    return max(max_difference(one[0], other[0]), float((one[1] != other[1]).mean()))


@torch.inference_mode()
def meaning(chat: Chat, items: Sequence[RecallItem]) -> np.ndarray:
    """Which facts are answered, bool [B]."""
    logits = statebridge.continue_from(chat.model, chat.session.state, asked(items)).logits
    return np.array([greedy_match(row, item) for row, item in zip(logits, items, strict=True)])


def lost(known: np.ndarray, answered: np.ndarray) -> float:
    """Share of the facts known to the session that never left which the returned one does not answer."""
    return float((known & ~answered).sum() / known.sum())


def asked(items: Sequence[RecallItem]) -> torch.Tensor:
    """Questions with their answers [B, N]; padding to the right changes nothing before it."""
    rows = [[*item.prompt_ids, *item.answer_ids] for item in items]
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])


@dataclass(frozen=True)
class HandedOver:
    """The source reads the prefix, leaves through the store, and the receiver goes on through a bridge.

    Attributes
    ----------
    source
        Folder of the source.
    bridge
        From states of the source to states of the receiver.
    """

    source: str
    bridge: Any
    name: str = "handed over by the bridge"

    def __call__(self, setting: Setting[Chat]) -> Any:
        """The outcome on the receiver."""
        return setting.outcome(self.translated(setting, setting.anchor))

    def translated(self, setting: Setting[Chat], to: Any) -> tuple[Buffer, ...]:
        """Buffers of the receiver after the source went to an anchor."""
        here = Chat(self.source)
        to(here)
        session = HybridSession()
        session.load(setting.store.restore(setting.store.checkpoint(here)))
        session.state = self.bridge(session.state)
        return tuple(session.buffers())


@dataclass(frozen=True)
class WrongTranslation:
    """A state of the source that came to the receiver by a wrong way.

    Attributes
    ----------
    name
        As the verdict lists it.
    way
        The hand-over.
    alter
        What goes wrong: a state of the receiver to another.
    """

    name: str
    way: HandedOver
    alter: Any

    def __call__(self, setting: Setting[Chat]) -> Iterable[Buffer]:
        """The buffers that are loaded instead."""
        session = HybridSession()
        session.load(self.way.translated(setting, setting.anchor))
        session.state = self.alter(session.state)
        return tuple(session.buffers())
