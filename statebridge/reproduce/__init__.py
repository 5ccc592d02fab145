"""The whole reproduction of both experiments: from documents to one report, resumable at every stage."""

from statebridge.reproduce.config import SuiteConfig, with_sources
from statebridge.reproduce.models import open_pair
from statebridge.reproduce.suite import reproduce
from statebridge.reproduce.verify import verify_suite

__all__ = ["SuiteConfig", "open_pair", "reproduce", "verify_suite", "with_sources"]
