"""Which session leaves memory first: one file per policy.

`LRU`, `GreedyDualSize`, `TTL`, `Relevance` and `Pinned` are for use. `PredictiveShrinking` and
`PredictiveAdmission` are baselines of an experiment, in which they did not help.
"""

from statebridge.sessions.policies.admission import PredictiveAdmission
from statebridge.sessions.policies.base import Policy, Refined, Resident, checked_relevance
from statebridge.sessions.policies.lru import LRU
from statebridge.sessions.policies.pinned import Pinned
from statebridge.sessions.policies.relevance import Relevance
from statebridge.sessions.policies.shrinking import PredictiveShrinking
from statebridge.sessions.policies.size_aware import GreedyDualSize
from statebridge.sessions.policies.ttl import TTL

__all__ = [
    "LRU",
    "TTL",
    "GreedyDualSize",
    "Pinned",
    "Policy",
    "PredictiveAdmission",
    "PredictiveShrinking",
    "Refined",
    "Relevance",
    "Resident",
    "checked_relevance",
]
