"""Count the tokens that a model really reads.

A hand-over is worth its name only if no prefix token is read again. The counter hooks the input embedding,
through which every token must pass, so it counts what happened and not what was meant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class TokenCount:
    """Tokens per row that passed the input embedding in each forward pass."""

    passes: list[int] = field(default_factory=list)

    @property
    def per_row(self) -> int:
        """Tokens per row, all passes together."""
        return sum(self.passes)


@contextlib.contextmanager
def count_tokens(model: Any) -> Iterator[TokenCount]:
    """Count the tokens that `model` reads inside the `with` block."""
    count = TokenCount()

    def see(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        count.passes.append(int(output.shape[-2]))

    handle = model.get_input_embeddings().register_forward_hook(see)
    try:
        yield count
    finally:
        handle.remove()
