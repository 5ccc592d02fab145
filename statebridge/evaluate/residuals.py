"""How far the calibrator moves the state, by layer and field.

    residual = ‖calibrated − planned‖ / ‖planned‖        per document, over all values of one tensor

The planned state is what the bridge's plan alone makes. Large residuals say that the calibrator corrects more
than a small mismatch. Knows states and bridges, and the source that is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import torch

from statebridge.bridge import Bridge, ModelPair, TokenWindow
from statebridge.capture import prefill
from statebridge.evaluate.arms import handovers
from statebridge.state import HybridState
from statebridge.state.layer import FIELDS


def residual_table(
    pair: ModelPair, windows: Sequence[TokenWindow], prefix: int, *, bridge: Bridge
) -> pa.Table:
    """Residual of every layer and field for a batch of documents.

    Parameters
    ----------
    pair, bridge
        The models and a bridge with a calibrator.
    windows
        Documents of at least `prefix` tokens.
    prefix
        Prefix length L.

    Returns
    -------
    pyarrow.Table
        Columns document, layer, field, residual.
    """
    bridges = handovers(bridge)
    ids = torch.stack([window.ids[:prefix] for window in windows])
    with torch.inference_mode():
        source = prefill(pair.source, ids).state()
        found = residuals(bridges[bridge.config.plan](source), bridges["calibrated"](source))
    return pa.Table.from_pylist(
        [
            {"document": window.id, "layer": layer, "field": name, "residual": value}
            for (layer, name), values in found.items()
            for window, value in zip(windows, values.tolist(), strict=True)
        ]
    )


def residuals(planned: HybridState, moved: HybridState) -> dict[tuple[int, str], torch.Tensor]:
    """(layer, field) -> relative size [B] of what separates two states of one shape."""
    found: dict[tuple[int, str], Any] = {}
    for index, (ours, theirs) in enumerate(zip(planned.layers, moved.layers, strict=True)):
        for name in FIELDS:
            before, after = getattr(ours, name), getattr(theirs, name)
            if before is not None:
                base, change = before.double().flatten(1), (after.double() - before.double()).flatten(1)
                found[index, name] = (change.norm(dim=1) / base.norm(dim=1)).cpu()
    return found
