"""Buffers to blobs and back.

A buffer that grows is cut into segments along its axis; the i-th segments of all buffers of one length make one
blob. A later checkpoint of the session, or one of its fork, cuts the shared prefix in the same places and finds
those blobs in the store. Everything else is packed in order. Small pieces share a blob because every blob costs
a sync; large ones of fixed buffers have one of their own, so that they are found again when others change.

Digests bound the speed of both ways, so the next blobs are hashed, or read and hashed, in other threads meanwhile.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from statebridge.errors import StoreError
from statebridge.sessions.manifest import BlobRef, Chunk, Cut, Entry, Manifest, cut_of
from statebridge.sessions.session import Buffer, Bytes

BLOB_BYTES = 1 << 24
LARGE_BYTES = 1 << 22
_In = TypeVar("_In")
_Out = TypeVar("_Out")
_Item = tuple[int, int]  # index of a buffer, index of its chunk


def pack(
    buffers: Iterable[Buffer],
    segment: int,
    ref_of: Callable[[Sequence[Bytes]], BlobRef],
    keep: Callable[[Sequence[Bytes], BlobRef], None],
) -> tuple[tuple[BlobRef, ...], tuple[Entry, ...]]:
    """Cut buffers into blobs, a few in memory at a time, and list where everything went.

    Parameters
    ----------
    buffers
        The buffers of a session.
    segment
        Entries of a growing axis in one chunk.
    ref_of
        Names a blob, given in pieces; called from several threads.
    keep
        Stores a blob under its name; called in order, from this thread.

    Raises
    ------
    StoreError
        When two buffers have one name.
    """
    ordered = sorted(buffers, key=lambda buffer: buffer.name)
    for one, other in itertools.pairwise(ordered):
        if one.name == other.name:
            raise StoreError(f"The session has two buffers named {one.name}; give each a name of its own.")
    steps = [BLOB_BYTES if buffer.spec.grows is None else segment for buffer in ordered]
    cuts = [cut_of(buffer.spec, step) for buffer, step in zip(ordered, steps, strict=True)]
    total = sum(buffer.data.nbytes for buffer in ordered)
    blobs: list[BlobRef] = []
    chunks: list[list[Chunk]] = [[] for _ in ordered]

    def cut(items: list[_Item]) -> tuple[list[Bytes], BlobRef]:
        pieces = [_piece(ordered[buffer], cuts[buffer], chunk) for buffer, chunk in items]
        return pieces, ref_of(pieces)

    for items, (pieces, ref) in _ahead(cut, _groups(ordered, cuts), total):
        keep(pieces, ref)
        blobs.append(ref)
        offset = 0
        for (buffer, _), piece in zip(items, pieces, strict=True):
            chunks[buffer].append(Chunk(len(blobs) - 1, offset, piece.nbytes))
            offset += piece.nbytes
    entries = tuple(
        Entry(buffer.spec, step, tuple(places))
        for buffer, step, places in zip(ordered, steps, chunks, strict=True)
    )
    return tuple(blobs), entries


def unpack(manifest: Manifest, read: Callable[[BlobRef], bytes]) -> tuple[Buffer, ...]:
    """Put the buffers of a checkpoint together.

    Parameters
    ----------
    manifest
        A checked manifest.
    read
        Gives the content of a blob, after it has checked it; called from several threads.
    """
    contents = [np.empty(entry.spec.nbytes, np.uint8) for entry in manifest.buffers]
    wanted: dict[int, list[_Item]] = {}
    for buffer, entry in enumerate(manifest.buffers):
        for index, chunk in enumerate(entry.chunks):
            wanted.setdefault(chunk.blob, []).append((buffer, index))
    for blob, raw in _ahead(lambda blob: read(manifest.blobs[blob]), wanted, manifest.nbytes):
        content = np.frombuffer(raw, np.uint8)
        for buffer, index in wanted[blob]:
            entry = manifest.buffers[buffer]
            _, offset, nbytes = entry.chunks[index]
            target = _view(contents[buffer], entry.cut, index)
            target[...] = content[offset : offset + nbytes].reshape(target.shape)
    return tuple(Buffer(entry.spec, data) for entry, data in zip(manifest.buffers, contents, strict=True))


def _ahead(work: Callable[[_In], _Out], items: Iterable[_In], nbytes: int) -> Iterator[tuple[_In, _Out]]:
    """Every item with what `work` makes of it, in order; the next ones are worked on in other threads meanwhile."""
    if nbytes < LARGE_BYTES:  # threads would take longer to start
        yield from ((item, work(item)) for item in items)
        return
    workers = min(4, os.cpu_count() or 1)
    waiting: collections.deque[tuple[_In, concurrent.futures.Future[_Out]]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for item in items:
            waiting.append((item, pool.submit(work, item)))
            if len(waiting) > workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()


def _groups(buffers: Sequence[Buffer], cuts: Sequence[Cut]) -> Iterator[list[_Item]]:
    """Chunks that go into one blob, in order."""
    together: dict[tuple[int, int] | None, list[_Item]] = {}
    for buffer, cut in enumerate(cuts):
        grows = buffers[buffer].spec.grows is not None
        for chunk in range(cut.chunks):
            # buffers of other lengths end elsewhere, and would change a blob that could be shared
            key = (cut.length, chunk) if grows else None
            if not grows and cut.nbytes(chunk) >= LARGE_BYTES:
                yield [(buffer, chunk)]
            else:
                together.setdefault(key, []).append((buffer, chunk))
    for items in together.values():
        group: list[_Item] = []
        size = 0
        for buffer, chunk in items:
            nbytes = cuts[buffer].nbytes(chunk)
            if group and size + nbytes > BLOB_BYTES:
                yield group
                group, size = [], 0
            group.append((buffer, chunk))
            size += nbytes
        yield group


def _piece(buffer: Buffer, cut: Cut, chunk: int) -> Bytes:
    """Row-major bytes of a chunk, flat."""
    return np.ascontiguousarray(_view(buffer.data, cut, chunk)).reshape(-1)


def _view(data: Bytes, cut: Cut, chunk: int) -> npt.NDArray[np.uint8]:
    """The place of a chunk in its buffer, uint8 [outer, entries, inner]."""
    start, stop = cut.span(chunk)
    return data.reshape(cut.outer, cut.length, cut.inner)[:, start:stop]
