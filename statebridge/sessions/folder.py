"""The folder of a store: how it is made, recognised, and what its errors mean.

`store.json` holds the format, its version and the segment length: writers must cut growing buffers in the same
places for checkpoints to share them. It is written last, so a folder without it is no store yet.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

from statebridge.errors import StoreError
from statebridge.sessions.content import BLOBS, CHECKPOINTS
from statebridge.sessions.files import TEMPORARY, Files
from statebridge.sessions.index import INDEX_NAME
from statebridge.sessions.locks import LOCK_NAMES, StoreLock

FORMAT = "statebridge.sessions"
FORMAT_VERSION = 1
SEGMENT = 256
STORE = "store.json"
_OWN_NAMES = {STORE, BLOBS, CHECKPOINTS, TEMPORARY, INDEX_NAME, f"{INDEX_NAME}-journal", *LOCK_NAMES}
_MAY_NOT_WRITE = "choose a folder where you may write"
_FULL = "free some space, or clean the store with gc"
_LINK = "a store holds no links, nor files where folders belong, so remove what is there"
_REMEDIES = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _MAY_NOT_WRITE,
    errno.EPERM: _MAY_NOT_WRITE,
    errno.EROFS: _MAY_NOT_WRITE,
    errno.ELOOP: _LINK,
    errno.ENOTDIR: _LINK,
}


def create_store(files: Files, lock: StoreLock, segment: int) -> None:
    """Make a store in a missing or empty folder, or finish one that was begun.

    Raises
    ------
    StoreError
        When the folder holds anything else.
    """
    if not 1 <= segment <= 1 << 20:
        raise StoreError(f"Segments of {segment} entries are of no use; take some hundreds.")
    files.make_folder("")
    if foreign := set(os.listdir(files.root)) - _OWN_NAMES:
        raise StoreError(
            f"{files.root} holds {min(foreign)!r} and is no session store; choose an empty folder."
        )
    with lock.held(alone=True):
        if files.stat(STORE) is None:  # else another process was faster
            for folder in (BLOBS, CHECKPOINTS, TEMPORARY):
                files.make_folder(folder)
            settings = {"format": FORMAT, "format_version": FORMAT_VERSION, "segment": segment}
            files.put(STORE, [json.dumps(settings).encode()])
            files.sync_folder("")


def read_segment(files: Files) -> int:
    """Segment length of a store, after its format was checked.

    Raises
    ------
    StoreError
        When the folder is no store, or one of a newer version.
    """
    try:
        settings = json.loads(files.read(STORE, 4096))
        kind, version, segment = (settings[key] for key in ("format", "format_version", "segment"))
        if kind != FORMAT or type(version) is not int or type(segment) is not int or segment < 1:
            raise ValueError(settings)
    except FileNotFoundError:
        raise StoreError(f"{files.root} is no session store; check the path.") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{files.root / STORE} is damaged; write it again, as docs/sessions.md shows it."
        ) from error
    if version > FORMAT_VERSION:
        raise StoreError(
            f"{files.root} has format version {version}, this library reads up to {FORMAT_VERSION}; "
            "upgrade statebridge to use it."
        )
    return segment


@contextlib.contextmanager
def explained(root: Path, doing: str) -> Iterator[None]:
    """Turn an error of the operating system into one that says what the store could not do, and the remedy."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "check the disk and the folder")
        raise StoreError(f"{root} cannot {doing} ({error.strerror or error}); {remedy}.") from error
