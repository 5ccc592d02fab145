"""Move the inference state of a hybrid language model into a bigger one."""

from statebridge.bridge import Bridge, FitConfig, ModelPair, fit_bridge
from statebridge.capture import capture, continue_from, generate_from, prefill, restore
from statebridge.state import HybridState, inspect_state

__version__ = "0.1.0"

__all__ = [
    "Bridge",
    "FitConfig",
    "HybridState",
    "ModelPair",
    "capture",
    "continue_from",
    "fit_bridge",
    "generate_from",
    "inspect_state",
    "prefill",
    "restore",
]
