"""Settings of the suite's own that no single stage elsewhere has: models, restore control, further sets, speeds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import ConfigDict

from statebridge.bridge import DocumentsConfig
from statebridge.errors import ConfigError

_STRICT = ConfigDict(extra="forbid")  # inside mappings, where `load_config` cannot see a misspelt key


@dataclass(frozen=True)
class ModelsConfig:
    """The two models.

    Attributes
    ----------
    source, receiver
        Folder or hub name.
    source_revision, receiver_revision
        Commits on the hub.
    dtype
        Of both models; "auto" is that of the checkpoints.
    load
        "together" keeps both models on their devices; "sequential" keeps both on the host and one at a time on
        the device, for a device that does not hold both.
    random_weights
        Build models of the same shapes with random weights instead of loading any: a proof of everything but
        the values.
    tokenizer
        Folder or hub name of the tokenizer for random weights.
    seed
        Of random weights.
    """

    source: str = "Qwen/Qwen3.5-4B-Base"
    receiver: str = "Qwen/Qwen3.5-9B-Base"
    source_revision: str | None = None
    receiver_revision: str | None = None
    dtype: str = "bfloat16"
    load: Literal["together", "sequential"] = "together"
    random_weights: bool = False
    tokenizer: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class RestoreConfig:
    """The restore control: is a captured and restored state the same state?

    Attributes
    ----------
    contexts
        Documents of the fit set that are read.
    lengths
        Prefix lengths in tokens.
    """

    contexts: int = 16
    lengths: tuple[int, ...] = (128, 512, 1024, 4096)

    def __post_init__(self) -> None:
        """Refuse what could only fail after the models are loaded."""
        if self.contexts < 1 or not self.lengths or min(self.lengths) < 2:
            raise ConfigError("restore needs at least one context, and lengths of 2 tokens or more.")


@dataclass(frozen=True)
class LongConfig:
    """The branch with a longer prefix, which runs only when a gate of experiment 2 passes.

    Attributes
    ----------
    documents
        Where its documents come from.
    prefix, count
        Prefix length in tokens, and number of documents.
    behind
        Gate of experiment 2 that must pass first.
    on_request
        Run it whatever the gate says; the result says that it was asked for.
    """

    documents: DocumentsConfig = field(default_factory=DocumentsConfig)
    prefix: int = 16_384
    count: int = 16
    behind: str = "near native"
    on_request: bool = False


@dataclass(frozen=True)
class ShiftedConfig:
    """A test set of another domain, scored under the settings of experiment 2.

    Attributes
    ----------
    documents, count
        Where its documents come from, and how many.
    """

    __pydantic_config__: ClassVar[ConfigDict] = _STRICT

    documents: DocumentsConfig
    count: int = 64


@dataclass(frozen=True)
class ThroughputConfig:
    """Speed of each model on the machine at hand, for the expected time; unknown where left out.

    Attributes
    ----------
    source, receiver
        Tokens per second in long passes.
    pass_seconds
        What a forward pass takes at least, however few tokens it reads.
    state_bytes
        Bytes per second at which stored states are read, their digest checked.
    """

    source: float | None = None
    receiver: float | None = None
    pass_seconds: float = 0.0
    state_bytes: float = 1.0e9
