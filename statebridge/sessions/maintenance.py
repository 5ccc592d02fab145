"""What keeps a store sound: reading everything again, and removing what nothing names.

The caller holds the store's lock, alone for `collect`.
"""

from __future__ import annotations

from dataclasses import dataclass

from statebridge.errors import StoreError
from statebridge.sessions.content import BLOBS, CHECKPOINTS, Content
from statebridge.sessions.files import TEMPORARY
from statebridge.sessions.manifest import BlobRef


@dataclass(frozen=True)
class Collected:
    """What `gc` removed, or would remove: blobs, abandoned temporary files, and their bytes."""

    blobs: int
    temporary: int
    nbytes: int


@dataclass(frozen=True)
class Verified:
    """What `verify` read, and every problem it found, as (checkpoint id, what is wrong)."""

    checkpoints: int
    blobs: int
    nbytes: int
    problems: tuple[tuple[str, str], ...]


def verify(content: Content) -> Verified:
    """Compare every manifest, and every blob that one names, with its digest."""
    problems: list[tuple[str, str]] = []
    faults: dict[BlobRef, str] = {}
    identifiers = content.identifiers()
    for identifier in identifiers:
        try:
            blobs = content.manifest(identifier).blobs
        except (OSError, StoreError) as error:
            problems.append((identifier, str(error)))
            continue
        for ref in dict.fromkeys(blobs):
            if ref not in faults:
                faults[ref] = content.fault(ref)
            if faults[ref]:
                problems.append((identifier, faults[ref]))
    nbytes = sum(ref.nbytes for ref in faults)
    return Verified(len(identifiers), len(faults), nbytes, tuple(problems))


def collect(content: Content, dry_run: bool) -> Collected:
    """Remove blobs that no manifest names, and all temporary files.

    Raises
    ------
    StoreError
        When a manifest is damaged, because nobody knows what it named.
    """
    files = content.files
    try:
        named = {ref.digest for name in content.identifiers() for ref in content.manifest(name).blobs}
    except StoreError as error:
        raise StoreError(
            f"{error} Nobody knows which content it named; delete it, then clean the store."
        ) from error
    if not dry_run:
        # a deletion that a killed process did not sync must not come back without its content
        files.sync_folder(CHECKPOINTS)
    blobs = [f"{BLOBS}/{name}" for name in files.names(BLOBS) if name not in named]
    temporary = [f"{TEMPORARY}/{name}" for name in files.names(TEMPORARY)]
    nbytes = 0
    for path in (*blobs, *temporary):
        found = files.stat(path)
        nbytes += found.st_size if found is not None else 0
        if not dry_run:
            files.unlink(path)
    return Collected(len(blobs), len(temporary), nbytes)
