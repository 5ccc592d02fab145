"""How far the calibrator moves the state of the scored documents, by layer and field.

    residual = ‖calibrated − planned‖ / ‖planned‖        per document, over all values of one tensor

The planned state is what the bridge's plan alone makes. Large residuals say that the calibrator corrects more
than a small mismatch. The calibrator measures itself; this module knows whose state it moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import torch

from statebridge.bridge import Bridge, ModelPair, TokenWindow
from statebridge.calibrate import Calibrator
from statebridge.capture import prefill


def residual_table(
    pair: ModelPair, windows: Sequence[TokenWindow], prefix: int, *, bridge: Bridge, calibrator: Calibrator
) -> pa.Table:
    """Residual of every layer and field for a batch of documents.

    Parameters
    ----------
    pair, bridge, calibrator
        The models, the bridge and its calibrator.
    windows
        Documents of at least `prefix` tokens.
    prefix
        Prefix length L.

    Returns
    -------
    pyarrow.Table
        Columns document, layer, field, residual.
    """
    ids = torch.stack([window.ids[:prefix] for window in windows])
    with torch.inference_mode():
        planned = bridge.with_plan(bridge.config.plan)(prefill(pair.source, ids).state())
        found = calibrator.movement(planned.layers)
    return pa.Table.from_pylist(
        [
            {"document": window.id, "layer": layer, "field": name, "residual": value}
            for (layer, name), (moved, size) in found.items()
            for window, value in zip(windows, (moved / size).sqrt().tolist(), strict=True)
        ]
    )
