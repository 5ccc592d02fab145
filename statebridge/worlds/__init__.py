"""A small world to remember: scenes, a renderer, and a video model that walks through them.

The instrument for everything about sessions and pruning of world models, where no published weights are at hand.
"""

from statebridge.worlds.cache import ChunkKV, HistoryCache, Slots
from statebridge.worlds.conditioning import Conditioning
from statebridge.worlds.geometry import Camera, Grid
from statebridge.worlds.model import WorldConfig, WorldModel
from statebridge.worlds.rotary import Rotary, rotate
from statebridge.worlds.sampler import Sampler, Trajectory, encode_chunk, predict_at, write_chunk

__all__ = [
    "Camera",
    "ChunkKV",
    "Conditioning",
    "Grid",
    "HistoryCache",
    "Rotary",
    "Sampler",
    "Slots",
    "Trajectory",
    "WorldConfig",
    "WorldModel",
    "encode_chunk",
    "predict_at",
    "rotate",
    "write_chunk",
]
