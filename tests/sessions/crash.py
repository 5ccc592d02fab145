"""A disk that can lose power: records file operations and gives every state that a crash may leave.

What a crash may do, as POSIX allows it: content that was not synced is lost or half there; a name that was given,
changed or removed in a folder that was not synced since is as before; and all of this in any order, one thing kept
while another that came earlier is lost.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from statebridge.sessions.files import Files

Disk = dict[str, bytes]  # path -> content


@dataclass(frozen=True)
class Op:
    """One operation: what, on which path or folder, and the file that was meant."""

    what: str
    path: str = ""
    target: str = ""
    file: int = -1
    data: bytes = b""


class Recorder(Files):
    """Does everything, and writes it down."""

    def __init__(self, root: Path, ops: list[Op]) -> None:
        super().__init__(root)
        self.ops = ops
        self.open: dict[int, int] = {}  # handle -> file
        self.file_of: dict[str, int] = {}

    def create(self, path: str) -> int:
        handle = super().create(path)
        number = len(self.ops)
        self.open[handle] = self.file_of[path] = number
        self.ops.append(Op("create", path, file=number))
        return handle

    def write(self, handle: int, data: Any) -> None:
        super().write(handle, data)
        self.ops.append(Op("write", file=self.open[handle], data=bytes(data)))

    def sync(self, handle: int) -> None:
        super().sync(handle)
        self.ops.append(Op("sync", file=self.open[handle]))

    def rename(self, path: str, target: str) -> None:
        super().rename(path, target)
        self.file_of[target] = self.file_of.pop(path)
        self.ops.append(Op("rename", path, target, self.file_of[target]))

    def unlink(self, path: str) -> None:
        super().unlink(path)
        self.ops.append(Op("unlink", path))

    def sync_folder(self, folder: str) -> None:
        super().sync_folder(folder)
        self.ops.append(Op("sync_folder", folder))


class Failing(Files):
    """The n-th writing operation fails; a write gets half of its data out first."""

    def __init__(self, root: Path, left: list[int], error: int = errno.ENOSPC) -> None:
        super().__init__(root)
        self.left = left
        self.error = error

    def _count(self) -> bool:
        self.left[0] -= 1
        return self.left[0] == 0

    def _fail(self) -> None:
        raise OSError(self.error, os.strerror(self.error))

    def write(self, handle: int, data: Any) -> None:
        if self._count():
            super().write(handle, memoryview(data)[: len(data) // 2])
            self._fail()
        super().write(handle, data)


def _failing(name: str) -> Any:
    def method(self: Failing, *args: Any) -> Any:
        if self._count():
            self._fail()
        return getattr(Files, name)(self, *args)

    return method


for _name in ("make_folder", "create", "sync", "rename", "unlink", "sync_folder"):
    setattr(Failing, _name, _failing(_name))


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def unsynced(ops: list[Op]) -> list[int]:
    """Indices of operations whose effect a crash after `ops` may undo."""
    loose = []
    synced_files: set[int] = set()
    synced_folders: set[str] = set()
    settled: set[int] = set()  # files whose last name is durable
    for index in reversed(range(len(ops))):
        op = ops[index]
        if op.what == "sync":
            synced_files.add(op.file)
        elif op.what == "sync_folder":
            synced_folders.add(op.path)
        elif op.what == "write":
            if op.file not in synced_files:
                loose.append(index)
        elif folder_of(op.target or op.path) in synced_folders:
            settled.add(op.file)
        elif op.what != "create" or op.file not in settled:
            loose.append(index)
    return loose[::-1]


def disk_after(base: Disk, ops: list[Op], lost: set[int], torn: int | None) -> Disk:
    """The disk after a crash in which some operations were lost and one write was torn."""
    names: dict[str, Any] = {path: path for path in base}
    contents: dict[Any, bytes] = dict(base)
    for index, op in enumerate(ops):
        if index in lost:
            continue
        if op.what == "create":
            names[op.path] = op.file
        elif op.what == "write":
            data = op.data[: len(op.data) // 2] if index == torn else op.data
            contents[op.file] = contents.get(op.file, b"") + data
        elif op.what == "rename":
            names.pop(op.path, None)
            names[op.target] = op.file
        elif op.what == "unlink":
            names.pop(op.path, None)
    return {path: contents.get(file, b"") for path, file in names.items()}


def crashes(base: Disk, ops: list[Op]) -> Iterator[Disk]:
    """Every disk that a crash after `ops` may leave: one loss, one tear, one survivor, none, or all lost."""
    loose = unsynced(ops)
    everything = set(loose)
    yield disk_after(base, ops, set(), None)
    yield disk_after(base, ops, everything, None)
    for index in loose:
        yield disk_after(base, ops, {index}, None)
        yield disk_after(base, ops, everything - {index}, None)
        if ops[index].what == "write":
            yield disk_after(base, ops, set(), index)


def read_disk(root: Path) -> Disk:
    """Files of a store, without its index."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not path.name.startswith("index.sqlite")
    }


def write_disk(root: Path, disk: Disk) -> None:
    for folder in ("blobs", "checkpoints", "temporary"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for path, content in disk.items():
        (root / path).write_bytes(content)
