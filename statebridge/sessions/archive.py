"""One checkpoint as one file, to be sent or kept elsewhere.

A plain tar: the manifest under the checkpoint's id, then its blobs under their digests, in the manifest's order.
Reading accepts exactly this: ordinary members with these names and sizes, one after the other; nothing is ever
extracted to a path that an archive names.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from statebridge.errors import StoreError
from statebridge.sessions.content import ref_of
from statebridge.sessions.manifest import MAX_MANIFEST_BYTES, BlobRef, Manifest, checked_id
from statebridge.sessions.session import Bytes


def write_archive(target: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write members to the new file `target`; equal members give equal files."""
    with tarfile.open(target, "x", format=tarfile.USTAR_FORMAT) as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))


def read_archive(source: Path, keep: Callable[[Sequence[Bytes], BlobRef], None]) -> tuple[str, Manifest]:
    """Read an archive; give the content of each blob to `keep`, one in memory at a time.

    Parameters
    ----------
    source
        The file.
    keep
        Stores a blob, given in pieces, under its name.

    Returns
    -------
    tuple
        The checkpoint's id and its manifest, all of whose blobs have been kept.

    Raises
    ------
    StoreError
        When the file is no archive of a checkpoint, is truncated, or was changed.
    """
    try:
        total = source.stat().st_size
        with source.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as archive:
            name, content = _next(archive, min(total, MAX_MANIFEST_BYTES))
            identifier = checked_id(name)
            manifest = Manifest.decode(identifier, content)
            for ref in dict.fromkeys(manifest.blobs):
                name, content = _next(archive, min(total, ref.nbytes))
                pieces = [np.frombuffer(content, np.uint8)]
                if name != ref.digest or ref_of(pieces) != ref:
                    raise ValueError(f"blob {ref.digest[:12]} is missing or was changed")
                keep(pieces, ref)
            if archive.next() is not None:
                raise ValueError("it holds more than one checkpoint")
            return identifier, manifest
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise StoreError(
            f"{source} is no sound archive of a checkpoint ({error}); export it again."
        ) from error


def _next(archive: tarfile.TarFile, limit: int) -> tuple[str, bytes]:
    """Name and content of the next member, an ordinary file of at most `limit` bytes."""
    member = archive.next()
    if member is None or member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.size > limit:
        raise ValueError(f"unexpected {'end' if member is None else repr(member.name[:80])}")
    content = archive.extractfile(member)
    raw = content.read() if content is not None else b""
    if len(raw) != member.size:
        raise ValueError(f"{member.name[:80]!r} is cut short")
    return member.name, raw
