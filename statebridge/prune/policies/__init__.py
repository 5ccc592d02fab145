"""Pruning policies, one a file; a new one is a dataclass with `score`, and a line here."""

from statebridge.prune.policies.decoprune import DeCoPrune
from statebridge.prune.policies.decoprune_hs import DeCoPruneHS
from statebridge.prune.policies.full import Full
from statebridge.prune.policies.random import Random
from statebridge.prune.policies.reversed_discrepancy import ReversedDiscrepancy
from statebridge.prune.policies.streaming import Streaming
from statebridge.prune.policies.temporal_difference import TemporalDifference
from statebridge.prune.policy import Policy

#: Every policy by its name.
POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (Full, Streaming, Random, TemporalDifference, ReversedDiscrepancy, DeCoPrune, DeCoPruneHS)
}

__all__ = [
    "POLICIES",
    "DeCoPrune",
    "DeCoPruneHS",
    "Full",
    "Random",
    "ReversedDiscrepancy",
    "Streaming",
    "TemporalDifference",
]
