"""Two models and the tokenizer they share: the source that reads, the receiver that continues."""

from __future__ import annotations

import hashlib
import json
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from statebridge.capture import identity_of
from statebridge.capture.load import load_model
from statebridge.errors import StateMismatch, UnsupportedModel
from statebridge.state import ModelIdentity

if TYPE_CHECKING:
    from statebridge.bridge.bridge import Bridge
    from statebridge.bridge.handoff import Prompt, Reply
    from statebridge.capture import Continuation, Generation
    from statebridge.state import HybridState


@dataclass(frozen=True)
class ModelPair:
    """Source, receiver and their tokenizer.

    Attributes
    ----------
    source, receiver
        Causal language models of transformers, in eval mode.
    tokenizer
        The tokenizer of both.
    """

    source: Any
    receiver: Any
    tokenizer: Any

    @classmethod
    def from_pretrained(
        cls,
        source: str,
        receiver: str,
        *,
        dtype: str | torch.dtype = "auto",
        device_map: Any = None,
        source_revision: str | None = None,
        receiver_revision: str | None = None,
        **options: Any,
    ) -> ModelPair:
        """Load both models and check that their tokenizers agree.

        Parameters
        ----------
        source, receiver
            Folder or hub name of each model.
        dtype, device_map, **options
            As in transformers' `from_pretrained`; `device_map` may be a pair (source, receiver).
        source_revision, receiver_revision
            Revisions on the hub.

        Raises
        ------
        StateMismatch
            When the tokenizers differ, so that token ids of one mean nothing to the other.
        UnsupportedModel
            When a model cannot be loaded, lacks weights or has no tokenizer.
        """
        if isinstance(dtype, str) and dtype != "auto":
            dtype = _dtype(dtype)
        maps = device_map if isinstance(device_map, (tuple, list)) else (device_map, device_map)
        models, tokenizers = [], []
        for name, revision, where in (
            (source, source_revision, maps[0]),
            (receiver, receiver_revision, maps[1]),
        ):
            model, tokenizer = load_model(name, dtype=dtype, device_map=where, revision=revision, **options)
            if tokenizer is None:
                raise UnsupportedModel(
                    f"The model {name} has no tokenizer; put the one it was trained with beside it."
                )
            models.append(model)
            tokenizers.append(tokenizer)
        require_same_tokenizer(*tokenizers)
        return cls(models[0], models[1], tokenizers[1])

    @property
    def source_identity(self) -> ModelIdentity:
        """Identity of the source."""
        return identity_of(self.source)

    @property
    def receiver_identity(self) -> ModelIdentity:
        """Identity of the receiver."""
        return identity_of(self.receiver)

    @property
    def takes_turns(self) -> bool:
        """Whether only one of the models is on its device at a time."""
        return False

    def handoff(
        self,
        prompt: Prompt,
        *,
        bridge: Bridge,
        state: HybridState | Continuation | Generation | None = None,
        bridge_tokens: int = 1,
        **generation: Any,
    ) -> Reply:
        """Let the source read the prompt and the receiver answer; see `statebridge.bridge.handoff.handoff`."""
        from statebridge.bridge.handoff import handoff

        return handoff(self, prompt, bridge=bridge, state=state, bridge_tokens=bridge_tokens, **generation)


_digests: weakref.WeakKeyDictionary[Any, tuple[int, str]] = weakref.WeakKeyDictionary()


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 of everything that decides how a tokenizer cuts text."""
    known = _digests.get(tokenizer)
    if known is not None and known[0] == len(tokenizer):
        return known[1]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        for setting in ("truncation", "padding"):  # of the latest call, which the backend remembers
            content.pop(setting, None)
        text = json.dumps(content, sort_keys=True)
    else:
        text = repr(sorted(tokenizer.get_vocab().items()))
    digest = hashlib.sha256(text.encode()).hexdigest()
    _digests[tokenizer] = (len(tokenizer), digest)
    return digest


def require_same_tokenizer(source: Any, receiver: Any) -> None:
    """Raise `StateMismatch` when two tokenizers cut text differently."""
    ours, theirs = tokenizer_digest(source), tokenizer_digest(receiver)
    if ours != theirs:
        raise StateMismatch(
            "source and receiver have different tokenizers",
            {
                "tokenizer digest": (ours[:12], theirs[:12]),
                "vocabulary size": (len(source), len(receiver)),
            },
            "Use two models of one family with one tokenizer.",
        )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedModel(f"{name!r} is no dtype of torch; use float32, bfloat16 or float16.")
    return dtype
