"""Durable sessions: named buffers in a store that survives crashes, shares prefixes and forks for nothing."""

from typing import TYPE_CHECKING, Any

from statebridge.sessions.adapters import HybridSession
from statebridge.sessions.index import Checkpoint
from statebridge.sessions.maintenance import Collected, Verified
from statebridge.sessions.manifest import Manifest
from statebridge.sessions.runtime import SessionRuntime
from statebridge.sessions.runtime_records import Usage
from statebridge.sessions.session import Buffer, BufferKind, BufferSpec, Session
from statebridge.sessions.store import SessionStore

if TYPE_CHECKING:
    from statebridge.sessions.runtime_language import LanguageEngine

__all__ = [
    "Buffer",
    "BufferKind",
    "BufferSpec",
    "Checkpoint",
    "Collected",
    "HybridSession",
    "LanguageEngine",
    "Manifest",
    "Session",
    "SessionRuntime",
    "SessionStore",
    "Usage",
    "Verified",
]


def __getattr__(name: str) -> Any:
    if name == "LanguageEngine":  # it brings transformers along, which takes seconds
        from statebridge.sessions.runtime_language import LanguageEngine

        return LanguageEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
