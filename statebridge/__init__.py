"""Move the inference state of a hybrid language model into a bigger one.

The names below load their rooms when they are first used, so that importing the package, and with it the
command line's help, takes no time.
"""

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_ROOMS = {
    "statebridge.bridge": ("Bridge", "FitConfig", "ModelPair", "fit_bridge"),
    "statebridge.capture": ("continue_from", "generate_from", "prefill", "restore"),
    "statebridge.state": ("HybridState", "inspect_state"),
}


class _Package(types.ModuleType):
    """Keeps `statebridge.capture` the function, where importing the room of that name would put the room."""

    @property
    def capture(self) -> Any:
        return importlib.import_module("statebridge.capture").capture

    @capture.setter
    def capture(self, room: types.ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    for room, names in _ROOMS.items():
        if name in names:
            value = getattr(importlib.import_module(room), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
