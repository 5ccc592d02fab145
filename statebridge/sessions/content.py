"""Manifests and blobs on disk: written once, found by digest, never changed.

The caller holds the store's lock. What was written here, or read and found sound, is remembered with the inode it
had, so that the next checkpoint of a session neither reads nor syncs the prefix that it shares. Knows files, no
sessions.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence

from statebridge.errors import StoreError
from statebridge.sessions.files import Files
from statebridge.sessions.manifest import MAX_MANIFEST_BYTES, BlobRef, Manifest, checked_id, is_id
from statebridge.sessions.session import Bytes

BLOBS, CHECKPOINTS = "blobs", "checkpoints"


class Content:
    """Manifests and blobs under `files`."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self._sound: dict[str, tuple[int, int, int]] = {}

    def keep(self, pieces: Sequence[Bytes], ref: BlobRef, fresh: set[str]) -> None:
        """Store a blob unless it is there and sound; note it in `fresh` if `commit` must make it durable."""
        path = f"{BLOBS}/{ref.digest}"
        found = self.files.stat(path)
        if found is not None and self._sound.get(ref.digest) == _which(found):
            return
        # what another process has written may be neither whole nor durable yet
        fresh.add(ref.digest)
        if self.fault(ref):
            self.files.put(path, pieces)

    def commit(self, manifest: Manifest, fresh: Iterable[str] = ()) -> str:
        """Make a checkpoint durable: the names of its fresh blobs, the manifest, its name."""
        if digests := list(fresh):
            self.files.sync_folder(BLOBS)
            for digest in digests:
                if found := self.files.stat(f"{BLOBS}/{digest}"):
                    self._sound[digest] = _which(found)
        identifier, raw = manifest.encode()
        self.files.put(f"{CHECKPOINTS}/{identifier}", [raw])
        self.files.sync_folder(CHECKPOINTS)
        return identifier

    def identifiers(self) -> list[str]:
        """Ids of all manifests, sound or not."""
        return [name for name in self.files.names(CHECKPOINTS) if is_id(name)]

    def raw_manifest(self, identifier: str) -> bytes:
        """Bytes of a manifest.

        Raises
        ------
        StoreError
            When there is none of this id.
        """
        try:
            return self.files.read(f"{CHECKPOINTS}/{checked_id(identifier)}", MAX_MANIFEST_BYTES)
        except FileNotFoundError:
            raise unknown(identifier) from None

    def manifest(self, identifier: str) -> Manifest:
        """A manifest, checked."""
        return Manifest.decode(identifier, self.raw_manifest(identifier))

    def check_sizes(self, identifier: str, manifest: Manifest) -> None:
        """Raise `StoreError` when a blob is missing or has another size than the manifest says."""
        for ref in manifest.blobs:
            found = self.files.stat(f"{BLOBS}/{ref.digest}")
            if found is None or found.st_size != ref.nbytes:
                raise _damaged(identifier, _size_fault(ref, found))

    def blob(self, identifier: str, ref: BlobRef) -> bytes:
        """Content of a blob of a checkpoint.

        Raises
        ------
        StoreError
            When it does not match its digest.
        """
        raw = self.files.read(f"{BLOBS}/{ref.digest}", ref.nbytes)
        if hashlib.sha256(raw).hexdigest() != ref.digest:
            raise _damaged(identifier, f"blob {ref.digest[:12]} does not match its digest")
        return raw

    def fault(self, ref: BlobRef) -> str:
        """What is wrong with a blob, "" when nothing is; reads it a block at a time."""
        path = f"{BLOBS}/{ref.digest}"
        try:
            found = self.files.stat(path)
            if found is None or found.st_size != ref.nbytes:
                return _size_fault(ref, found)
            sha = hashlib.sha256()
            for block in self.files.blocks(path):
                sha.update(block)
        except (OSError, StoreError) as error:  # an unreadable sector, a link in place of a file
            return f"blob {ref.digest[:12]} cannot be read ({error})"
        return "" if sha.hexdigest() == ref.digest else f"blob {ref.digest[:12]} does not match its digest"


def ref_of(pieces: Sequence[Bytes]) -> BlobRef:
    """Name and size of a blob, given in pieces; other threads run meanwhile."""
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece.data)
    return BlobRef(sha.hexdigest(), sum(piece.nbytes for piece in pieces))


def unknown(identifier: str) -> StoreError:
    """The error for a checkpoint that is not in the store."""
    return StoreError(
        f"The store has no checkpoint {identifier[:12]}; `statebridge sessions ls` shows what it has."
    )


def _damaged(identifier: str, fault: str) -> StoreError:
    return StoreError(
        f"Checkpoint {identifier[:12]} is damaged: {fault}; restore another one of its line, or import it again."
    )


def _size_fault(ref: BlobRef, found: os.stat_result | None) -> str:
    size = "is missing" if found is None else f"has {found.st_size} bytes instead of {ref.nbytes}"
    return f"blob {ref.digest[:12]} {size}"


def _which(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns
