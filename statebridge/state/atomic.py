"""Replace a file as a whole: a kill at any moment leaves the old content or the new one.

The new content is written in a temporary folder beside the target (writers such as safetensors put temporary
files of their own there), fsynced and renamed over the target; then the target's folder is fsynced. The writer
holds a lock on its temporary folder; what a killed writer left behind has none, and the next writer of the
same target removes it. Knows files only.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from statebridge.errors import StateFileError

_YOUNG = 60.0  # seconds in which a folder without a lock may still be on its way to one


@contextlib.contextmanager
def atomic_file(target: Path) -> Iterator[Path]:
    """Give a temporary path, whose content replaces the file `target` when the block succeeds.

    Raises
    ------
    StateFileError
        When the folder is missing, read-only or full; the old file, if any, is untouched.
    """
    folder = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    temporary = folder / target.name
    try:
        _remove_abandoned(target)
        folder.mkdir()
        try:
            with _opened(folder) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield temporary
                # some writers give rights to the owner alone; the folder's are cut by the umask as usual
                temporary.chmod(folder.stat().st_mode & 0o666)
                with _opened(temporary) as handle:
                    os.fsync(handle)
                temporary.replace(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        with _opened(target.parent) as handle:
            os.fsync(handle)
    except OSError as error:
        raise StateFileError(
            f"{target} cannot be written ({error.strerror or error}); "
            "choose an existing folder with space where you may write."
        ) from error


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


def _remove_abandoned(target: Path) -> None:
    for folder in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        with contextlib.suppress(OSError), _opened(folder) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - folder.stat().st_mtime > _YOUNG:
                shutil.rmtree(folder, ignore_errors=True)
