"""An SQLite index over the manifests, so that listing thousands of checkpoints reads none of them.

A cache and nothing more: manifests never change and are named by their digest, so comparing names in the folder
with rows says exactly which to add and which to drop. Writers of checkpoints do not touch it. An index that is
missing, damaged, foreign or not writable is made anew, in memory if need be. Restoring and collecting garbage
read manifests, never the index.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from statebridge.sessions.manifest import Manifest

INDEX_NAME = "index.sqlite"
_SCHEMA = (
    "CREATE TABLE checkpoints (id TEXT PRIMARY KEY, parent TEXT, created REAL, label TEXT, nbytes INTEGER)",
    "CREATE TABLE refs (id TEXT, blob TEXT, nbytes INTEGER, PRIMARY KEY (id, blob))",
    "CREATE INDEX refs_of_blob ON refs (blob)",
)
_ROWS = """
    SELECT id, parent, created, label, nbytes, (
        SELECT COALESCE(SUM(r.nbytes), 0) FROM refs r WHERE r.id = c.id
        AND NOT EXISTS (SELECT 1 FROM refs o WHERE o.blob = r.blob AND o.id <> r.id)
    ) FROM checkpoints c ORDER BY created, id
"""


@dataclass(frozen=True)
class Checkpoint:
    """What a list of checkpoints shows of one.

    Attributes
    ----------
    id, parent
        Its id and that of the checkpoint it came from, which may have been deleted since; None for a first one.
    created
        Seconds since 1970.
    label
        Free text.
    nbytes
        Bytes of its buffers.
    own_nbytes
        Bytes in the store that no other checkpoint shares: what deleting it would free.
    """

    id: str
    parent: str | None
    created: float
    label: str
    nbytes: int
    own_nbytes: int


class Index:
    """The index in folder `root`."""

    def __init__(self, root: Path) -> None:
        self.path = root / INDEX_NAME

    def checkpoints(
        self, present: Iterable[str], load: Callable[[str], Manifest | None]
    ) -> tuple[Checkpoint, ...]:
        """Every checkpoint, oldest first, after the index was brought up to the manifests that are present.

        Parameters
        ----------
        present
            Ids of the manifests in the store.
        load
            Gives the manifest of an id; None for one that cannot be read, which is left out.
        """
        names = set(present)
        for anew in (False, True):
            with contextlib.suppress(sqlite3.Error, OSError):
                if anew or self.path.is_symlink():
                    self.remove()
                return _brought_up(str(self.path), names, load)
        return _brought_up(":memory:", names, load)

    def remove(self) -> None:
        """Forget everything; the next use reads the manifests again."""
        for suffix in ("", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                self.path.with_name(INDEX_NAME + suffix).unlink()


def _brought_up(path: str, names: set[str], load: Callable[[str], Manifest | None]) -> tuple[Checkpoint, ...]:
    with contextlib.closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as database:
        database.execute("PRAGMA trusted_schema = OFF")
        database.execute("BEGIN IMMEDIATE")  # closing without a COMMIT rolls back
        _require_tables(database)
        known = {row[0] for row in database.execute("SELECT id FROM checkpoints")}
        for gone in known - names:
            database.execute("DELETE FROM checkpoints WHERE id = ?", (gone,))
            database.execute("DELETE FROM refs WHERE id = ?", (gone,))
        for new in sorted(names - known):
            if (manifest := load(new)) is None:
                continue
            row = (new, manifest.parent, manifest.created, manifest.label, manifest.nbytes)
            database.execute("INSERT INTO checkpoints VALUES (?, ?, ?, ?, ?)", row)
            refs = {(new, blob.digest, blob.nbytes) for blob in manifest.blobs}
            database.executemany("INSERT INTO refs VALUES (?, ?, ?)", refs)
        rows = tuple(Checkpoint(*row) for row in database.execute(_ROWS))
        database.execute("COMMIT")
        return rows


def _require_tables(database: sqlite3.Connection) -> None:
    found = {row[0] for row in database.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    if not found:
        for statement in _SCHEMA:
            database.execute(statement)
    elif found != set(_SCHEMA):
        raise sqlite3.DatabaseError("these are not the tables of an index")
