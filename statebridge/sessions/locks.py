"""A lock that many may share or one may hold, among threads and processes, and that dies with its owner.

Two files and `flock`. Everyone passes the gate, one at a time, and waits for the lock inside it; so one who
wants the lock alone is not starved by a stream of those who share it. The kernel drops both when a process
ends, however it ends. A thread must not take the lock while it holds it. Made for local file systems.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

LOCK_NAMES = ("gate", "lock")


class StoreLock:
    """The lock of the store in folder `root`."""

    def __init__(self, root: Path) -> None:
        self.gate, self.lock = (root / name for name in LOCK_NAMES)

    @contextlib.contextmanager
    def held(self, *, alone: bool) -> Iterator[None]:
        """Hold the lock, `alone` or with others, while the block runs."""
        with _opened(self.lock) as lock:
            with _opened(self.gate) as gate:
                fcntl.flock(gate, fcntl.LOCK_EX)
                fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
            yield


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    safe = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | safe, 0o666)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        handle = os.open(path, os.O_RDONLY | safe)  # a store that may only be read is locked all the same
    try:
        yield handle
    finally:
        # closing alone would not unlock where a child process has inherited the open file
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
