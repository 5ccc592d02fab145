"""Read states from transformers models, put them back, and continue from them."""

from statebridge.capture.capture import capture, restore
from statebridge.capture.continuation import Continuation, continue_from, prefill
from statebridge.capture.families import FAMILIES, REFUSED, FamilyRule
from statebridge.capture.generation import Generation, generate_from
from statebridge.capture.model import identity_of, profile
from statebridge.capture.tokens import TokenCount, count_tokens

__all__ = [
    "FAMILIES",
    "REFUSED",
    "Continuation",
    "FamilyRule",
    "Generation",
    "TokenCount",
    "capture",
    "continue_from",
    "count_tokens",
    "generate_from",
    "identity_of",
    "prefill",
    "profile",
    "restore",
]
