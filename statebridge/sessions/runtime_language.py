"""Makes chats on hybrid language models for a runtime (`statebridge.sessions.runtime_chat`).

An engine serves several models: the identity in a state says which of them a chat is on.
"""

from __future__ import annotations

from typing import Any

import torch

from statebridge.capture import identity_of
from statebridge.errors import ConfigError, StateMismatch
from statebridge.sessions.runtime_chat import LanguageSession
from statebridge.state import HybridState, ModelIdentity


class LanguageEngine:
    """Makes chats on transformers models.

    Parameters
    ----------
    *models
        Causal language models. New sessions begin on the first; loaded ones go on with the model they were on.
    tokenizer
        Digest of the tokenizer, "" when unknown.

    Raises
    ------
    ConfigError
        When there is no model.
    """

    def __init__(self, *models: Any, tokenizer: str = "") -> None:
        if not models:
            raise ConfigError("An engine without a model makes no chats; give it at least one.")
        self.models = list(models)
        self.tokenizer = tokenizer

    def fresh(
        self, *, state: HybridState | None = None, pending: torch.Tensor | None = None, seed: int = 0
    ) -> LanguageSession:
        """A session off the device.

        Parameters
        ----------
        state
            What was read so far; None to begin from nothing.
        pending
            Tokens [B, N] that were chosen and not read yet.
        seed
            Seed of its generator.
        """
        return LanguageSession(self, state, pending, seed)

    def model_of(self, identity: ModelIdentity) -> Any:
        """The model of a state.

        Raises
        ------
        StateMismatch
            When it is none of the engine's.
        """
        for model in self.models:
            if not identity_of(model).differences(identity):
                return model
        raise StateMismatch(
            "this session is on a model that the runtime does not have",
            dict(identity_of(self.models[0]).differences(identity)),
            "Give the runtime an engine of all models: LanguageEngine(source, receiver).",
        )
