"""One backbone, three runtimes: what a world model must keep between requests differs by how it remembers."""

from statebridge.worlds.runtimes.bank import BankSession
from statebridge.worlds.runtimes.engine import WorldEngine
from statebridge.worlds.runtimes.markov import MarkovSession
from statebridge.worlds.runtimes.overlap import view_overlap
from statebridge.worlds.runtimes.session import WorldSession
from statebridge.worlds.runtimes.windowed import WindowedSession, stored

__all__ = [
    "BankSession",
    "MarkovSession",
    "WindowedSession",
    "WorldEngine",
    "WorldSession",
    "stored",
    "view_overlap",
]
