"""Strips of frames: one row a way of making them, one block a task, saved as PNG.

Knows pictures and matplotlib, no model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from torch import Tensor

from statebridge.evaluate import palette


def as_bytes(frames: Tensor) -> Any:
    """Return pictures in [-1, 1] as a uint8 array of the same shape."""
    return ((frames.float().clamp(-1, 1) + 1) * 127.5).round().byte().cpu().numpy()


def save_strips(
    blocks: Sequence[Mapping[str, Any]], path: Path, *, titles: Sequence[str] = (), across: bool = False
) -> None:
    """Draw blocks of named rows.

    Parameters
    ----------
    blocks
        For each block the frames of each row, uint8 [G, 3, size, size]; every row has the same G.
    path
        PNG file to write.
    titles
        A line above each block.
    across
        Put the blocks beside each other, with names on the left alone; they must have the same rows.
    """
    rows = max(len(block) for block in blocks)
    wide = max(len(frames) for block in blocks for frames in block.values())
    lines, columns = (1, len(blocks)) if across else (len(blocks), 1)
    with palette.style():
        size = (1.6 + 0.85 * wide * columns, (0.85 * rows + (0.35 if titles else 0.15)) * lines)
        figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="compressed")
        for i, (block, axis) in enumerate(zip(blocks, axes.flat, strict=True)):
            picture = np.concatenate([_row(frames) for frames in block.values()])
            axis.imshow(picture, interpolation="nearest")
            side = picture.shape[0] / len(block)
            names = [name.replace("_", " ").replace(" ", "\n") for name in block]
            axis.set_yticks([side * (row + 0.5) for row in range(len(block))], [] if across and i else names)
            axis.tick_params(length=0)
            axis.set_xticks([])
            axis.spines[:].set_visible(False)
            if titles:
                axis.set_title(titles[i])
        palette.save(figure, path, dpi=100)


def _row(frames: Any) -> Any:
    """Frames [G, 3, size, size] side by side, [size, G · size, 3], each with white at its right and lower edge."""
    frames = frames.copy()
    frames[..., -1:] = frames[..., -1:, :] = 255
    return np.concatenate(list(frames.transpose(0, 2, 3, 1)), axis=1)
