"""Durable sessions: named buffers in a store that survives crashes, shares prefixes and forks for nothing."""

from statebridge.sessions.adapters import HybridSession
from statebridge.sessions.index import Checkpoint
from statebridge.sessions.maintenance import Collected, Verified
from statebridge.sessions.manifest import Manifest
from statebridge.sessions.session import Buffer, BufferKind, BufferSpec, Session
from statebridge.sessions.store import SessionStore

__all__ = [
    "Buffer",
    "BufferKind",
    "BufferSpec",
    "Checkpoint",
    "Collected",
    "HybridSession",
    "Manifest",
    "Session",
    "SessionStore",
    "Verified",
]
