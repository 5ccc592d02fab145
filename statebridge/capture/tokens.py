"""Count the tokens that a model really reads.

A hand-over is worth its name only if no prefix token is read again. The counter hooks the input embedding,
through which every token must pass, so it counts what happened and not what was meant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class TokenCount:
    """Tokens per row that passed the input embedding, summed over forward passes."""

    per_row: int = 0
    forward_passes: int = 0

    def prefix_tokens(self, new: int) -> int:
        """Tokens read beyond the `new` ones per row that were meant to be read; 0 in a true hand-over."""
        return max(self.per_row - new, 0)


@contextlib.contextmanager
def count_tokens(model: Any) -> Iterator[TokenCount]:
    """Count the tokens that `model` reads inside the `with` block."""
    count = TokenCount()

    def see(module: torch.nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        count.per_row += int(output.shape[-2])
        count.forward_passes += 1

    handle = model.get_input_embeddings().register_forward_hook(see)
    try:
        yield count
    finally:
        handle.remove()
