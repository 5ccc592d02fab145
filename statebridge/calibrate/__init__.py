"""Identity-anchored, low-rank residuals on top of a plan. Knows tensors; training lives in the bridge room."""

from statebridge.calibrate.calibrator import Calibrator, Unit, layer_norms
from statebridge.calibrate.residual import ChannelAffine, LowRank, Residual, TwoSided

__all__ = ["Calibrator", "ChannelAffine", "LowRank", "Residual", "TwoSided", "Unit", "layer_norms"]
