"""A durable store of sessions: checkpoint, restore, fork, delete, and what keeps them sound.

    store.json            format and segment length, written when the store is made
    checkpoints/<id>      manifests; the id is the sha256 of the content
    blobs/<digest>        content; the name is its sha256
    temporary/            files that are being written
    index.sqlite          a cache (see `statebridge.sessions.index`)
    gate, lock            locks (see `statebridge.sessions.locks`)

A checkpoint is written blobs first, then their folder is synced, then the manifest is written and its folder
synced; only then is the id given back. Whatever is killed before leaves the store as it was, with some files to
be collected. Deleting removes a manifest; `gc` removes what no manifest names, alone in the store. Blobs lie in
one folder, so that a checkpoint syncs one. Nothing in a store is executed. Knows buffers, no tensors, no models.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
import secrets
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from statebridge.errors import StoreError
from statebridge.sessions.archive import read_archive, write_archive
from statebridge.sessions.chunks import pack, unpack
from statebridge.sessions.content import CHECKPOINTS, Content, ref_of, unknown
from statebridge.sessions.files import Files
from statebridge.sessions.folder import SEGMENT, STORE, create_store, explained, read_segment
from statebridge.sessions.index import Checkpoint, Index
from statebridge.sessions.locks import StoreLock
from statebridge.sessions.maintenance import Collected, Verified, collect, verify
from statebridge.sessions.manifest import Manifest, checked_id
from statebridge.sessions.session import Buffer, Session
from statebridge.state.atomic import atomic_file


class SessionStore:
    """A store in a folder; several threads and processes may use one at once.

    Parameters
    ----------
    path
        The folder, on a local file system.
    create
        Make the store if the folder is missing or empty.
    segment
        Entries of a growing axis in one chunk, fixed when the store is made (256 when left out).
    files
        How files of a folder are written.

    Raises
    ------
    StoreError
        When the folder holds something else, cannot be used, or the store is newer than this library.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = True,
        segment: int | None = None,
        files: Callable[[Path], Files] = Files,
    ) -> None:
        self.path = Path(path).resolve()
        self._files = files(self.path)
        self._content = Content(self._files)
        self._lock = StoreLock(self.path)
        self._index = Index(self.path)
        with explained(self.path, "be opened"):
            if create and not (self.path / STORE).exists():
                create_store(self._files, self._lock, SEGMENT if segment is None else segment)
            self.segment = read_segment(self._files)
        if segment not in (None, self.segment):
            raise StoreError(
                f"{self.path} has segments of {self.segment} entries, not {segment}; leave it out."
            )

    def checkpoint(self, session: Session, parent: str | None = None, label: str = "") -> str:
        """Store a session; what is given back is durable.

        Parameters
        ----------
        session
            Gives its buffers once.
        parent
            Id of the checkpoint that it was restored from, or of its latest one.
        label
            A line of free text.

        Returns
        -------
        str
            The id: 64 hexadecimal digits.

        Raises
        ------
        StoreError
            When the parent is unknown, the buffers are ill-formed, or a file cannot be written. The store then
            shows what it showed before.
        """
        buffers = tuple(session.buffers())
        with explained(self.path, "take a checkpoint"), self._lock.held(alone=False):
            if parent is not None:
                self._content.raw_manifest(parent)  # damaged or not: this session is sound
            fresh: set[str] = set()
            keep = functools.partial(self._content.keep, fresh=fresh)
            blobs, entries = pack(buffers, self.segment, ref_of, keep)
            manifest = Manifest(parent, time.time(), label, secrets.token_hex(8), blobs, entries)
            return self._content.commit(manifest, fresh)

    def restore(self, identifier: str) -> tuple[Buffer, ...]:
        """The buffers of a checkpoint, every byte checked; give them to `Session.load`.

        Raises
        ------
        StoreError
            When the checkpoint is unknown, damaged, or larger than this machine's memory.
        """
        with explained(self.path, "restore a checkpoint"), self._lock.held(alone=False):
            manifest = self._content.manifest(identifier)
            self._content.check_sizes(identifier, manifest)
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            if manifest.nbytes > memory:
                raise StoreError(
                    f"Checkpoint {identifier[:12]} needs {manifest.nbytes} bytes, and this machine has {memory}; "
                    "restore it on a larger one."
                )
            return unpack(manifest, lambda ref: self._content.blob(identifier, ref))

    def fork(self, identifier: str, label: str = "") -> str:
        """A checkpoint of equal content with `identifier` as its parent; no content is copied."""
        with explained(self.path, "fork a checkpoint"), self._lock.held(alone=False):
            manifest = self._content.manifest(identifier)
            self._content.check_sizes(identifier, manifest)
            child = dataclasses.replace(
                manifest, parent=identifier, created=time.time(), label=label, nonce=secrets.token_hex(8)
            )
            return self._content.commit(child)

    def delete(self, identifier: str) -> None:
        """Remove a checkpoint; its children stay whole. `gc` frees the space."""
        with explained(self.path, "delete a checkpoint"), self._lock.held(alone=True):
            try:
                self._files.unlink(f"{CHECKPOINTS}/{checked_id(identifier)}")
            except FileNotFoundError:
                raise unknown(identifier) from None
            self._files.sync_folder(CHECKPOINTS)

    def list(self) -> tuple[Checkpoint, ...]:
        """Every checkpoint, oldest first; warns of those whose manifest is damaged."""

        def load(identifier: str) -> Manifest | None:
            try:
                return self._content.manifest(identifier)
            except StoreError as error:
                if self._files.stat(f"{CHECKPOINTS}/{identifier}"):  # else it was deleted a moment ago
                    warnings.warn(str(error), stacklevel=4)
                return None

        with explained(self.path, "list its checkpoints"):
            return self._index.checkpoints(self._content.identifiers(), load)

    def identifiers(self) -> tuple[str, ...]:
        """Ids of all checkpoints, also of those whose manifest is damaged and that `list` leaves out."""
        with explained(self.path, "list its checkpoints"):
            return tuple(self._content.identifiers())

    def lineage(self, identifier: str) -> tuple[Checkpoint, ...]:
        """The checkpoint, its parent, and so on; an ancestor that was deleted ends the line."""
        known = {checkpoint.id: checkpoint for checkpoint in self.list()}
        if checked_id(identifier) not in known:
            raise unknown(identifier)
        line = []
        at: str | None = identifier
        while at in known:  # a digest cannot name itself, so there is no circle
            line.append(known[at])
            at = known[at].parent
        return tuple(line)

    def manifest(self, identifier: str) -> Manifest:
        """What a checkpoint holds, without its content."""
        with explained(self.path, "read a checkpoint"):
            return self._content.manifest(identifier)

    def verify(self) -> Verified:
        """Read every byte and compare it with its digest; make the index anew."""
        with explained(self.path, "be verified"), self._lock.held(alone=False):
            with contextlib.suppress(OSError):  # a store that may only be read can be verified too
                self._index.remove()
            return verify(self._content)

    def gc(self, *, dry_run: bool = False) -> Collected:
        """Remove content that no checkpoint names, and what killed writers left behind.

        Waits until nobody else uses the store. Refuses to run while a manifest is damaged, because nobody knows
        what it named.
        """
        with explained(self.path, "be cleaned"), self._lock.held(alone=True):
            return collect(self._content, dry_run)

    def export_archive(self, identifier: str, target: str | os.PathLike[str]) -> None:
        """Write a checkpoint, every byte checked, to one new file (see `statebridge.sessions.archive`)."""
        path = Path(target)
        if path.exists():
            raise StoreError(f"{path} exists already; choose another name.")
        with (
            explained(self.path, "export a checkpoint"),
            self._lock.held(alone=False),
            atomic_file(path) as file,
        ):
            raw = self._content.raw_manifest(identifier)
            blobs = dict.fromkeys(Manifest.decode(identifier, raw).blobs)
            members = ((ref.digest, self._content.blob(identifier, ref)) for ref in blobs)
            write_archive(file, itertools.chain([(identifier, raw)], members))

    def import_archive(self, source: str | os.PathLike[str]) -> str:
        """Take a checkpoint from an archive; it keeps its id, and its parent need not be here."""
        with explained(self.path, "import a checkpoint"), self._lock.held(alone=False):
            fresh: set[str] = set()
            keep = functools.partial(self._content.keep, fresh=fresh)
            identifier, manifest = read_archive(Path(source), keep)
            self._content.commit(manifest, fresh)
            return identifier
