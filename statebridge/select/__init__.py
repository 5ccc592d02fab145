"""Choose which components of a state are translated and which are copied, from scores of documents.

This room knows arrays, arm names and layer numbers; models and how scores come about are elsewhere.
"""

from statebridge.select.plan import GLOBAL_PLANS, Plan
from statebridge.select.search import Search, layer_groups, search
from statebridge.select.select import Selection, select

__all__ = ["GLOBAL_PLANS", "Plan", "Search", "Selection", "layer_groups", "search", "select"]
