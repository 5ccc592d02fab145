"""Operations on the files of one store, each a method of its own.

Tests record these operations, replay every prefix of them, drop, tear and reorder those that were not synced,
and let the n-th fail. Paths are relative, of a fixed form, and opened without following links, so nothing
written in a store can lead out of it. Errors are those of the operating system; the store says what they mean.

Durability: a file's content is durable after `sync`, its name after `sync_folder` of its folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from statebridge.errors import StoreError

TEMPORARY = "temporary"
_NAME = re.compile(r"[a-z0-9][a-z0-9.]{0,99}")
_PATH = re.compile(rf"(?:([a-z]+)/)?({_NAME.pattern})")
# a pipe in place of a file would otherwise wait for a writer
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_BLOCK = 1 << 20


class Files:
    """Files under `root`, in folders one level deep.

    Parameters
    ----------
    root
        The folder; "" stands for it where a folder is asked for.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    # writing: one operation each

    def make_folder(self, folder: str) -> None:
        """Make a folder, unless it is there; the root's own name is made durable as well."""
        with contextlib.suppress(FileExistsError):
            (self.root / folder).mkdir()
            if not folder:
                Files(self.root.parent).sync_folder("")

    def create(self, path: str) -> int:
        """Open a new file for writing."""
        return self._open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(self, handle: int, data: Any) -> None:
        """Write all of a bytes-like object."""
        left = memoryview(data)
        while left.nbytes:
            left = left[os.write(handle, left) :]

    def sync(self, handle: int) -> None:
        """Make the content of an open file durable."""
        os.fsync(handle)

    def rename(self, path: str, target: str) -> None:
        """Give a file another name, over any file that has it."""
        with self._named(path) as (folder, name), self._named(target) as (target_folder, target_name):
            os.rename(name, target_name, src_dir_fd=folder, dst_dir_fd=target_folder)

    def unlink(self, path: str) -> None:
        """Remove a file."""
        with self._named(path) as (folder, name):
            os.unlink(name, dir_fd=folder)

    def sync_folder(self, folder: str) -> None:
        """Make names in a folder durable."""
        with self._folder(folder) as handle:
            os.fsync(handle)

    def put(self, path: str, pieces: Iterable[Any]) -> None:
        """Write a whole file under a temporary name, sync it, and give it its name."""
        temporary = f"{TEMPORARY}/{secrets.token_hex(16)}"
        handle = self.create(temporary)
        try:
            try:
                for piece in pieces:
                    self.write(handle, piece)
                self.sync(handle)
            finally:
                os.close(handle)
            self.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self.unlink(temporary)
            raise

    # reading

    def names(self, folder: str) -> list[str]:
        """Names in a folder that a store may have given, sorted; what other programs left there is not ours."""
        with self._folder(folder) as handle:
            return sorted(name for name in os.listdir(handle) if _NAME.fullmatch(name))

    def stat(self, path: str) -> os.stat_result | None:
        """Facts of a regular file; None when there is none of this name."""
        with self._named(path) as (folder, name):
            try:
                found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                return None
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"{self.root / path} is no regular file, and a store holds no links; remove it.")
        return found

    def blocks(self, path: str) -> Iterator[bytes]:
        """Content of a regular file in blocks of up to a MiB."""
        self.stat(path)
        with open(self._open(path, os.O_RDONLY), "rb") as file:
            while block := file.read(_BLOCK):
                yield block

    def read(self, path: str, limit: int) -> bytes:
        """Content of a regular file of at most `limit` bytes, whose size is looked at before any is read."""
        found = self.stat(path)
        if found is None:
            raise FileNotFoundError(2, "No such file", str(self.root / path))
        if found.st_size > limit:
            raise StoreError(f"{self.root / path} has {found.st_size} bytes; at most {limit} were expected.")
        with open(self._open(path, os.O_RDONLY), "rb") as file:
            return file.read(limit)

    def _open(self, path: str, flags: int) -> int:
        with self._named(path) as (folder, name):
            return os.open(name, flags | _SAFE, 0o666, dir_fd=folder)

    @contextlib.contextmanager
    def _named(self, path: str) -> Iterator[tuple[int, str]]:
        match = _PATH.fullmatch(path)
        if match is None:
            raise StoreError(f"{path[:200]!r} is no path in a store.")
        with self._folder(match[1] or "") as folder:
            yield folder, match[2]

    @contextlib.contextmanager
    def _folder(self, folder: str) -> Iterator[int]:
        # the root may be reached through links, which are the user's own; folders inside may not
        handle = os.open(
            self.root / folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (os.O_NOFOLLOW if folder else 0)
        )
        try:
            yield handle
        finally:
            os.close(handle)
