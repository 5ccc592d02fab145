"""How well generated frames show what stands there: the target in its box, and the whole view.

The box is the bounding box of the target's pixels in the true frame; every frame that shows enough of it counts.
Four numbers: mean squared error in the box and over the view (pictures in [0, 1]), structural dissimilarity in
the box, (1 − SSIM) / 2, and the share of the target's own pixels that miss their colour by more than 0.15. All
four are errors: smaller is better. With weights of DINOv2 at hand, the cosine distance of box crops as well.

Knows pictures and masks, no model but that. Source of SSIM: Wang et al., 2004.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 (its usual name)

from statebridge.errors import PruneError
from statebridge.stats.bootstrap import Array

_VISIBLE = 24  # pixels of the target that make a frame count
_WRONG = 0.15

#: Each score, in the order of reports.
SCORES = ("target_mse", "target_dissimilarity", "target_missed", "view_mse")


def boxes_of(target: Tensor) -> Tensor:
    """Bounding boxes of masks bool [N, G, size, size], as masks of the same shape; empty masks stay empty."""
    rows, columns = target.any(-1), target.any(-2)  # [N, G, size]

    def between(axis: Tensor) -> Tensor:
        return (axis.cumsum(-1) > 0) & (axis.flip(-1).cumsum(-1).flip(-1) > 0)

    return between(rows)[..., :, None] & between(columns)[..., None, :]


def score(made: Tensor, truth: Tensor, target: Tensor) -> dict[str, Array]:
    """Score generated frames.

    Parameters
    ----------
    made, truth
        Frames [N, G, 3, size, size] in [-1, 1].
    target
        Pixels of the target in the true frames, bool [N, G, size, size].

    Returns
    -------
    scores
        One float64 [N] for each name in SCORES.

    Raises
    ------
    PruneError
        When a task never shows its target, or its frames hold values that are no numbers.
    """
    finite = made.isfinite().flatten(1).all(1)
    if not bool(finite.all()):  # they compare with nothing, so nothing of them would count as missed
        raise PruneError(
            f"Task {int((~finite).nonzero()[0])} was drawn with values that are no numbers; check the weights."
        )
    a, b = ((x.float().clamp(-1, 1) + 1) / 2 for x in (made, truth))
    shown = target.flatten(2).sum(2) >= _VISIBLE  # [N, G]
    if not bool(shown.any(1).all()):
        raise PruneError(
            f"Task {int((~shown.any(1)).nonzero()[0])} never shows its target; make other tasks."
        )
    box = boxes_of(target) & shown[..., None, None]
    error = (a - b).square().mean(2)  # [N, G, size, size]
    missed = ((a - b).abs().amax(2) > _WRONG).float()
    result = {
        "target_mse": _mean(error, box),
        "target_dissimilarity": _mean((1 - ssim(a, b)) / 2, box),
        "target_missed": _mean(missed, target & shown[..., None, None]),
        "view_mse": error.flatten(1).mean(1),
    }
    return {name: result[name].double().cpu().numpy() for name in SCORES}


def ssim(a: Tensor, b: Tensor, window: int = 7) -> Tensor:
    """Structural similarity of pictures [N, G, 3, size, size] in [0, 1], by pixel: [N, G, size, size]."""
    x, y = a.flatten(0, 1), b.flatten(0, 1)

    def blur(z: Tensor) -> Tensor:
        return F.avg_pool2d(z, window, 1, window // 2, count_include_pad=False)

    mx, my = blur(x), blur(y)
    vx, vy, cov = blur(x * x) - mx * mx, blur(y * y) - my * my, blur(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    value = (2 * mx * my + c1) * (2 * cov + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return value.mean(1).unflatten(0, a.shape[:2])  # type: ignore[no-untyped-call,no-any-return]


def psnr(mse: Array | float) -> Any:
    """Peak signal-to-noise ratio in dB of a mean squared error of pictures in [0, 1]."""
    return -10 * np.log10(np.maximum(mse, 1e-12))


def dino_score(folder: str | os.PathLike[str], device: torch.device | str) -> Callable[..., Array]:
    """Return a function like `score` that gives the cosine distance of DINOv2 features of box crops, [N].

    Parameters
    ----------
    folder
        A DINOv2 checkpoint in the format of transformers, as `facebook/dinov2-base`.

    Raises
    ------
    PruneError
        When the folder holds no such model.
    """
    from transformers import AutoModel

    try:
        model: Any = AutoModel.from_pretrained(folder).to(device).eval()
    except (OSError, ValueError) as error:
        raise PruneError(
            f"{folder} holds no DINOv2 model ({error}); give a folder with its weights."
        ) from error
    centre = torch.tensor([0.485, 0.456, 0.406], device=device)[:, None, None]
    spread = torch.tensor([0.229, 0.224, 0.225], device=device)[:, None, None]

    @torch.no_grad()
    def distance(made: Tensor, truth: Tensor, target: Tensor) -> Array:
        box, result = boxes_of(target), []
        for n in range(len(made)):
            g = int(target[n].flatten(1).sum(1).argmax())  # the frame that shows most of it
            rows, columns = (box[n, g].any(axis).nonzero()[:, 0] for axis in (1, 0))
            crop = (..., slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1))
            pair = torch.stack([made[n, g][crop], truth[n, g][crop]]).float().clamp(-1, 1)
            pair = F.interpolate((pair.to(device) + 1) / 2, (224, 224), mode="bicubic", antialias=True)
            one, other = model(pixel_values=(pair - centre) / spread).last_hidden_state[:, 0]
            result.append(1 - float(F.cosine_similarity(one, other, dim=0)))
        return np.asarray(result)

    return distance


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over a mask, [N]."""
    return (values * mask).flatten(1).sum(1) / mask.flatten(1).sum(1)
