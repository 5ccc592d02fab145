"""The values: layer states, bookkeeping, identities, rotation and the file format. Knows no models."""

from statebridge.state.bookkeeping import Bookkeeping
from statebridge.state.file import StateFileInfo, inspect_state
from statebridge.state.hybrid import HybridState
from statebridge.state.identity import ModelIdentity
from statebridge.state.layer import COMPONENTS, Component, LayerSpec, LayerState
from statebridge.state.rotation import RopeSpec, Rotation, rotate, unrotate

__all__ = [
    "COMPONENTS",
    "Bookkeeping",
    "Component",
    "HybridState",
    "LayerSpec",
    "LayerState",
    "ModelIdentity",
    "RopeSpec",
    "Rotation",
    "StateFileInfo",
    "inspect_state",
    "rotate",
    "unrotate",
]
