"""A tiny random pair with a real tokenizer: a Qwen3.5 source, a wider receiver of equal state geometry."""

from __future__ import annotations

import copy
import functools
from typing import Any

import tiny
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from statebridge.bridge import Document, ModelPair

#: Settings of a fit that takes half a second.
SMALL: dict[str, Any] = {
    "fit_documents": 10,
    "validation_documents": 4,
    "checkpoints": (16, 32),
    "batch_size": 4,
}
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@functools.cache
def tokenizer() -> Any:
    """A byte-level tokenizer of 260 entries; ids 0 to 2 are special."""
    special = ["<pad>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = CHAT
    return made


@functools.cache
def pair(**overrides: Any) -> ModelPair:
    """Source (hidden 48) and receiver (hidden 64) that share the tokenizer."""
    size = {"vocab_size": 260, **overrides}
    source = tiny.build("qwen3_5", seed=1, **size)
    receiver = tiny.build("qwen3_5", seed=2, hidden_size=64, intermediate_size=72, **size)
    return ModelPair(source, receiver, tokenizer())


def documents(count: int, characters: int = 400) -> list[Document]:
    """Different pieces of installed prose."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return [Document(f"topics-{i}", text[i * characters : (i + 1) * characters]) for i in range(count)]


def with_theta(model: Any, theta: float) -> Any:
    """The same weights under another rotary base."""
    config = copy.deepcopy(model.config)
    config.rope_parameters["rope_theta"] = theta
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    return other


def ids_of(text: str = "A prefix that the source reads, and a little more.") -> torch.Tensor:
    """Token ids [1, T] of a text."""
    return torch.tensor([tokenizer()(text)["input_ids"]])
