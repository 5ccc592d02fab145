"""Pruning of the key-value history of autoregressive video models.

A backbone (through an adapter), a policy and a session: the session generates or observes chunks, and what the
policy does not keep leaves the cache when it leaves the window.
"""

from statebridge.prune.backbone import Backbone, Clock, Geometry, Raggedness
from statebridge.prune.heads import HeadSplit, measure_split
from statebridge.prune.history import Visible, prune_chunk, pruning_ratio, visible_positions
from statebridge.prune.policies import (
    POLICIES,
    DeCoPrune,
    DeCoPruneHS,
    Full,
    Random,
    ReversedDiscrepancy,
    Streaming,
    TemporalDifference,
)
from statebridge.prune.policy import ChunkRecord, Policy, ScoredPolicy
from statebridge.prune.rotary import Reindex, Rotation
from statebridge.prune.session import PrunedSession

__all__ = [
    "POLICIES",
    "Backbone",
    "ChunkRecord",
    "Clock",
    "DeCoPrune",
    "DeCoPruneHS",
    "Full",
    "Geometry",
    "HeadSplit",
    "Policy",
    "PrunedSession",
    "Raggedness",
    "Random",
    "Reindex",
    "ReversedDiscrepancy",
    "Rotation",
    "ScoredPolicy",
    "Streaming",
    "TemporalDifference",
    "Visible",
    "measure_split",
    "prune_chunk",
    "pruning_ratio",
    "visible_positions",
]
