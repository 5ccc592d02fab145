"""The manifest of a checkpoint: which buffers it holds, and where their bytes lie.

One canonical JSON object; the checkpoint's id is the sha256 of these bytes, so a manifest that was changed,
exchanged or renamed is found out, and a checkpoint can never be edited. Blobs are named by the sha256 of their
content. Reading checks every field, size and range before anybody allocates memory for it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

from statebridge.errors import StoreError
from statebridge.sessions.session import ITEM_BYTES, BufferKind, BufferSpec

FORMAT = "statebridge.checkpoint"
FORMAT_VERSION = 1
MAX_MANIFEST_BYTES = 1 << 24  # some 800,000 chunks
_ID = re.compile(r"[0-9a-f]{64}")
_LONGEST_LABEL = 200
_YEAR_10000 = 253_402_300_800


class Chunk(NamedTuple):
    """A range of bytes in a blob: index of the blob in the manifest, offset, length."""

    blob: int
    offset: int
    nbytes: int


class BlobRef(NamedTuple):
    """A blob: sha256 and length of its content."""

    digest: str
    nbytes: int


class Cut(NamedTuple):
    """How a buffer is cut: [outer, length, inner] bytes, `step` entries of `length` a chunk."""

    outer: int
    length: int
    inner: int
    step: int

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.length // self.step) if self.outer * self.inner else 0

    def span(self, chunk: int) -> tuple[int, int]:
        """First entry of a chunk, and the first after it."""
        return chunk * self.step, min((chunk + 1) * self.step, self.length)

    def nbytes(self, chunk: int) -> int:
        """Bytes of a chunk."""
        start, stop = self.span(chunk)
        return self.outer * (stop - start) * self.inner


@dataclass(frozen=True)
class Entry:
    """A buffer of a checkpoint: its facts, entries per chunk, and the chunks in order."""

    spec: BufferSpec
    step: int
    chunks: tuple[Chunk, ...]

    @property
    def cut(self) -> Cut:
        """How the buffer is cut."""
        return cut_of(self.spec, self.step)


def cut_of(spec: BufferSpec, step: int) -> Cut:
    """How a buffer is cut: along the axis that grows, or, where none does, as a row of bytes."""
    if spec.grows is None:
        return Cut(1, spec.nbytes, 1, step)
    outer = inner = 1
    for axis, length in enumerate(spec.shape):
        if axis < spec.grows:
            outer *= length
        elif axis > spec.grows:
            inner *= length
    return Cut(outer, spec.shape[spec.grows], inner * ITEM_BYTES[spec.dtype], step)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint without the content of its buffers.

    Attributes
    ----------
    parent
        Id of the checkpoint that the session came from; None for the first one.
    created
        Seconds since 1970.
    label
        Free text.
    nonce
        Random, so that two checkpoints of equal content are two.
    blobs
        Blobs that the chunks lie in.
    buffers
        The buffers, sorted by name.
    """

    parent: str | None
    created: float
    label: str
    nonce: str
    blobs: tuple[BlobRef, ...]
    buffers: tuple[Entry, ...]

    def __post_init__(self) -> None:
        # a label is shown in terminals, and may come from somebody else's archive
        if len(self.label) > _LONGEST_LABEL or not self.label.isprintable():
            raise StoreError(
                f"The label {self.label[:40]!r} is not a printable line of at most {_LONGEST_LABEL} characters."
            )
        if not 0 <= self.created < _YEAR_10000:
            raise StoreError(f"The time of creation {self.created} is no date.")

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers together."""
        return sum(entry.spec.nbytes for entry in self.buffers)

    def encode(self) -> tuple[str, bytes]:
        """The checkpoint's id, and the bytes of which it is the sha256.

        Raises
        ------
        StoreError
            When there are too many chunks to be listed.
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["buffers"] = [
            {**dataclasses.asdict(e.spec), "step": e.step, "chunks": e.chunks} for e in self.buffers
        ]
        fields |= {"format": FORMAT, "format_version": FORMAT_VERSION}
        raw = json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
        if len(raw) > MAX_MANIFEST_BYTES:
            raise StoreError("The session has too many chunks for one checkpoint; use longer segments.")
        return hashlib.sha256(raw).hexdigest(), raw

    @classmethod
    def decode(cls, identifier: str, raw: bytes) -> Manifest:
        """Read and check a manifest.

        Raises
        ------
        StoreError
            When it was changed, is newer than this library, or disagrees with itself.
        """
        if hashlib.sha256(raw).hexdigest() != identifier:
            raise StoreError(
                f"The manifest of checkpoint {identifier[:12]} does not match its digest; it was damaged or changed."
            )
        try:
            fields = json.loads(raw)
            if fields["format"] != FORMAT:
                raise ValueError(f"its format is {fields['format']!r}")
            if _number(fields["format_version"]) > FORMAT_VERSION:
                raise StoreError(
                    f"Checkpoint {identifier[:12]} has format version {fields['format_version']}, this library "
                    f"reads up to {FORMAT_VERSION}; upgrade statebridge to read it."
                )
            blobs = tuple(BlobRef(checked_id(digest), _number(size)) for digest, size in fields["blobs"])
            buffers = tuple(_entry(entry, blobs) for entry in fields["buffers"])
            if len({entry.spec.name for entry in buffers}) != len(buffers):
                raise ValueError("two buffers have one name")
            parent = fields["parent"]
            manifest = cls(
                parent=None if parent is None else checked_id(parent),
                created=float(fields["created"]),
                label=_text(fields["label"]),
                nonce=_text(fields["nonce"]),
                blobs=blobs,
                buffers=buffers,
            )
            if manifest.encode()[1] != raw:
                raise ValueError("it is not in canonical form")
            return manifest
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise StoreError(f"Checkpoint {identifier[:12]} has a malformed manifest ({error!r}).") from error


def is_id(identifier: object) -> TypeGuard[str]:
    """Whether this is the lower-case hexadecimal sha256 that ids and digests are."""
    return isinstance(identifier, str) and _ID.fullmatch(identifier) is not None


def checked_id(identifier: object) -> str:
    """`identifier` itself, if it is one.

    Raises
    ------
    StoreError
        When it is not.
    """
    if not is_id(identifier):
        raise StoreError(
            f"{str(identifier)[:80]!r} is no checkpoint id; `statebridge sessions ls` shows them."
        )
    return identifier


def _entry(fields: Any, blobs: tuple[BlobRef, ...]) -> Entry:
    grows = fields["grows"]
    spec = BufferSpec(
        name=_text(fields["name"]),
        kind=BufferKind(fields["kind"]),
        dtype=_text(fields["dtype"]),
        shape=tuple(_number(axis) for axis in fields["shape"]),
        grows=None if grows is None else _number(grows),
        derivable_from=tuple(_text(name) for name in fields["derivable_from"]),
        cost=float(fields["cost"]),
    )
    entry = Entry(spec, _number(fields["step"]), tuple(Chunk(*map(_number, c)) for c in fields["chunks"]))
    # the number of chunks first: a shape from a file may ask for more than could be listed
    if entry.step < 1 or len(entry.chunks) != entry.cut.chunks:
        raise ValueError(f"{spec.name} has {len(entry.chunks)} chunks")
    for index, chunk in enumerate(entry.chunks):
        if chunk.nbytes != entry.cut.nbytes(index):
            raise ValueError(f"chunk {index} of {spec.name} has {chunk.nbytes} bytes")
        if chunk.blob >= len(blobs) or chunk.offset + chunk.nbytes > blobs[chunk.blob].nbytes:
            raise ValueError(f"chunk {index} of {spec.name} is outside its blob")
    return entry


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**48:
        raise ValueError(f"{value!r} where a count was expected")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} where text was expected")
    return value
