"""Damage is found, and hostile files are refused before anything is allocated, followed or believed."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import sqlite3
import tarfile
import warnings

import pytest
from toy import Toy, digest

from statebridge.errors import StoreError
from statebridge.sessions import SessionStore


@pytest.fixture
def store(quick_path) -> SessionStore:
    return SessionStore(quick_path / "store", segment=4)


def content_files(store: SessionStore) -> list:
    return sorted([*(store.path / "blobs").iterdir(), *(store.path / "checkpoints").iterdir()])


def test_any_flipped_byte_is_found(store) -> None:
    first = store.checkpoint(Toy(1).step(9))
    second = store.checkpoint(Toy(2).step(3))
    chance = random.Random(0)
    for path in content_files(store):
        sound = path.read_bytes()
        owners = {c for c in (first, second) if c == path.name or path.name in str(store.manifest(c).blobs)}
        assert len(owners) == 1
        for at in {0, len(sound) // 2, len(sound) - 1, *(chance.randrange(len(sound)) for _ in range(4))}:
            broken = bytearray(sound)
            broken[at] ^= 1 << chance.randrange(8)
            path.write_bytes(broken)
            with pytest.raises(StoreError, match=r"digest|damaged"):
                store.restore(*owners)
            assert {owner for owner, _ in store.verify().problems} == owners
            (other,) = {first, second} - owners
            store.restore(other)
        path.write_bytes(sound)
    assert store.verify().problems == ()


@pytest.mark.parametrize("how", ["cut", "longer", "empty", "gone", "exchanged", "link", "pipe"])
def test_other_damage_is_found(store, how, tmp_path) -> None:
    identifier = store.checkpoint(Toy(1).step(9))
    for path in content_files(store):
        sound = path.read_bytes()
        path.unlink()
        if how == "link":
            (tmp_path / "elsewhere").write_bytes(sound)  # the right content, but not the store's
            path.symlink_to(tmp_path / "elsewhere")
        elif how == "pipe":
            os.mkfifo(path)
        elif how != "gone":
            other = next(p for p in content_files(store) if p != path).read_bytes()
            changed = {"cut": sound[:-1], "longer": sound + b"\0", "empty": b"", "exchanged": other}
            path.write_bytes(changed[how])
        with pytest.raises(StoreError):
            store.restore(identifier)
        if not (how == "gone" and path.name == identifier):  # then nobody knows that it ever was
            assert [owner for owner, _ in store.verify().problems] == [identifier]
        path.unlink(missing_ok=True)
        path.write_bytes(sound)
    assert store.verify().problems == ()


def test_a_damaged_blob_is_healed_by_the_next_checkpoint_that_has_it(store) -> None:
    """Content found in the store is believed only after it was read."""
    toy = Toy().step(8)
    first = store.checkpoint(toy)
    for path in (store.path / "blobs").iterdir():
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    again = SessionStore(store.path)
    assert again.verify().problems
    again.checkpoint(toy)
    assert again.verify().problems == ()
    assert digest(again.restore(first)) == digest(toy.buffers())


def test_what_other_programs_leave_is_not_ours(store) -> None:
    toy = Toy().step(3)
    identifier = store.checkpoint(toy)
    strays = [store.path / folder / ".DS_Store" for folder in ("", "blobs", "checkpoints", "temporary")]
    for stray in strays:
        stray.write_bytes(b"x")
    again = SessionStore(store.path)
    again.gc()
    assert [c.id for c in again.list()] == [identifier]
    assert again.verify().problems == ()
    assert all(stray.exists() for stray in strays)


def test_gc_touches_nothing_while_a_manifest_is_damaged(store) -> None:
    identifier = store.checkpoint(Toy().step(9))
    path = store.path / "checkpoints" / identifier
    sound = path.read_bytes()
    path.write_bytes(sound[:-1])
    files = content_files(store)
    with pytest.raises(StoreError, match=r"does not match its digest.*delete it"):
        store.gc()
    assert content_files(store) == files
    child = store.checkpoint(Toy().step(10), parent=identifier)  # a sound session of a damaged parent
    with pytest.warns(UserWarning, match="does not match its digest"):
        assert [c.id for c in store.list()] == [child]
    path.write_bytes(sound)
    assert [c.id for c in store.list()] == [identifier, child]
    path.write_bytes(sound[:-1])
    assert set(store.identifiers()) == {identifier, child}
    store.delete(identifier)
    store.gc()
    assert digest(store.restore(child)) == digest(Toy().step(10).buffers())


@pytest.mark.parametrize("how", ["gone", "garbage", "foreign", "link", "emptied", "folder"])
def test_the_index_is_a_cache(store, how, tmp_path) -> None:
    toy = Toy().step(3)
    first = store.checkpoint(toy)
    store.checkpoint(toy.step(4), parent=first)
    expected = store.list()
    path = store.path / "index.sqlite"
    path.unlink()
    if how == "garbage":
        path.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 20)
    elif how == "foreign":
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE checkpoints (id TEXT)")
        database.close()
    elif how == "link":
        (tmp_path / "precious").write_bytes(b"")  # what sqlite would take for a new database
        path.symlink_to(tmp_path / "precious")
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "folder":
        path.mkdir()
    assert SessionStore(store.path).list() == expected
    assert store.list() == expected
    if how == "link":
        assert (tmp_path / "precious").read_bytes() == b""


def test_an_index_that_lies_about_content_changes_nothing_that_matters(store) -> None:
    identifier = store.checkpoint(Toy().step(9))
    store.list()
    with sqlite3.connect(store.path / "index.sqlite") as database:
        database.execute("DELETE FROM refs")
        database.execute("UPDATE checkpoints SET label = 'lie'")
    database.close()
    store.gc()
    assert digest(store.restore(identifier)) == digest(Toy().step(9).buffers())
    store.verify()
    assert store.list()[0].label == ""


def test_an_index_with_a_trigger_is_made_anew(store) -> None:
    """Nothing that a stranger left in a store runs."""
    store.list()
    with sqlite3.connect(store.path / "index.sqlite") as database:
        database.execute(
            "CREATE TRIGGER t AFTER INSERT ON checkpoints BEGIN UPDATE checkpoints SET label = 'lie'; END"
        )
    database.close()
    store.checkpoint(Toy())
    assert [c.label for c in store.list()] == [""]


def forged(store: SessionStore, change) -> str:
    """Store a manifest with a right digest and changed fields; give its id."""
    identifier = store.checkpoint(Toy().step(5))
    fields = json.loads((store.path / "checkpoints" / identifier).read_bytes())
    fields = change(fields) or fields
    raw = (
        fields
        if isinstance(fields, bytes)
        else json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()
    )
    name = hashlib.sha256(raw).hexdigest()
    (store.path / "checkpoints" / name).write_bytes(raw)
    return name


def setting(path: str, value):
    """A change of one field, `buffers.0.shape` for example; a value may be a function of the old one."""

    def change(fields) -> None:
        *way, last = [int(key) if key.isdigit() else key for key in path.split(".")]
        for key in way:
            fields = fields[key]
        fields[last] = value(fields[last]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    "change",
    [
        setting("format", "other"),
        setting("format_version", 2),
        setting("format_version", True),
        setting("buffers.1.shape", [2**47, 2**47, 2**47]),
        setting("buffers.1.shape", [2, 2**40, 3]),
        setting("buffers.1.shape", [2, -5, 3]),
        setting("buffers.1.shape", [2, True, 3]),
        setting("buffers.1.shape", [1] * 40),
        setting("buffers.1.step", 0),
        setting("buffers.1.step", 1),
        setting("buffers.1.grows", 3),
        setting("buffers.1.grows", None),
        setting("buffers.1.dtype", "object"),
        setting("buffers.1.kind", "pickle"),
        setting("buffers.1.name", "../../x"),
        setting("buffers.1.name", "clock"),
        setting("buffers.1.cost", float("nan")),
        setting("buffers.1.chunks", lambda chunks: chunks[:-1]),
        setting("buffers.1.chunks.0.0", 99),
        setting("buffers.1.chunks.0.1", 2**40),
        setting("buffers.1.chunks.0.1", -1),
        setting("buffers.1.chunks.0.2", 1),
        setting("buffers.1.chunks.0", [0, 0, 96, 0]),
        setting("blobs.0.0", "../../../../etc/passwd"),
        setting("blobs.0.0", "A" * 64),
        setting("blobs.0.1", 10**30),
        setting("parent", "../x"),
        setting("created", float("inf")),
        setting("created", 1e300),
        setting("label", "\x1b[2J"),
        setting("label", "x" * 201),
        setting("nonce", 5),
        lambda fields: fields.pop("label") and None,
        lambda fields: fields.update(extra=1),
        lambda fields: json.dumps(fields, indent=1).encode(),
        lambda fields: b"[" * 100_000,
        lambda fields: b"[]",
        lambda fields: b"\xff\xfe",
    ],
)
def test_forged_manifests_are_refused(store, change) -> None:
    name = forged(store, change)
    for attempt in (store.restore, store.fork, store.manifest):
        with pytest.raises(StoreError):
            attempt(name)
    assert [owner for owner, _ in store.verify().problems] == [name]


def test_a_checkpoint_larger_than_memory_is_refused_before_it_is_read(store) -> None:
    """A sparse blob costs its maker nothing."""
    size = 2**43
    sparse = store.path / "blobs" / ("a" * 64)

    def change(fields):
        fields["blobs"] = [["a" * 64, size]]
        entry = {"cost": 0.0, "derivable_from": [], "dtype": "uint8", "grows": 0, "kind": "kv", "name": "x"}
        fields["buffers"] = [entry | {"shape": [size], "step": size, "chunks": [[0, 0, size]]}]

    name = forged(store, change)
    with pytest.raises(StoreError, match="missing"):
        store.restore(name)
    sparse.touch()
    os.truncate(sparse, size)
    with pytest.raises(StoreError, match="this machine has"):
        store.restore(name)


def test_a_linked_folder_is_refused(store, quick_path) -> None:
    identifier = store.checkpoint(Toy())
    for name in ("blobs", "checkpoints", "temporary"):
        folder = store.path / name
        folder.rename(quick_path / name)
        folder.symlink_to(quick_path / name)
        with pytest.raises(StoreError, match="holds no links"):
            store.checkpoint(Toy().step(1), parent=identifier)
        folder.unlink()
        (quick_path / name).rename(folder)
    store.checkpoint(Toy(), parent=identifier)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged"),
        (b"[" * 4000, "damaged"),
        (b" " * 5000, "at most 4096"),
        (b'{"format": "statebridge.sessions", "format_version": 2, "segment": 4}', "upgrade"),
        (b'{"format": "other", "format_version": 1, "segment": 4}', "damaged"),
        (b'{"format": "statebridge.sessions", "format_version": 1, "segment": 0}', "damaged"),
    ],
)
def test_settings_are_checked(store, content, message) -> None:
    (store.path / "store.json").write_bytes(content)
    with pytest.raises(StoreError, match=message):
        SessionStore(store.path)


class TestArchive:
    steps = 150

    def exported(self, store, path) -> str:
        identifier = store.checkpoint(Toy(5).step(self.steps), label="sent")
        store.export_archive(identifier, path)
        return identifier

    def test_round_trip_into_another_store(self, store, quick_path) -> None:
        identifier = self.exported(store, quick_path / "a.tar")
        store.export_archive(identifier, quick_path / "b.tar")
        assert (quick_path / "a.tar").read_bytes() == (quick_path / "b.tar").read_bytes()
        other = SessionStore(quick_path / "other")  # with longer segments
        assert other.import_archive(quick_path / "a.tar") == identifier
        assert other.import_archive(quick_path / "a.tar") == identifier  # once more changes nothing
        assert digest(other.restore(identifier)) == digest(Toy(5).step(self.steps).buffers())
        assert [c.label for c in other.list()] == ["sent"]
        assert other.gc().blobs == 0
        with pytest.raises(StoreError, match="exists already"):
            store.export_archive(identifier, quick_path / "a.tar")

    def test_any_flipped_or_missing_byte_is_found(self, store, quick_path) -> None:
        """Or it changes nothing: a tar has bytes, such as times and padding, that mean nothing here."""
        path = quick_path / "a.tar"
        identifier = self.exported(store, path)
        sound, chance = path.read_bytes(), random.Random(1)
        refused = 0
        for number in range(60):
            broken = bytearray(sound)
            at = chance.randrange(len(sound))
            broken[at] ^= 1 << chance.randrange(8)
            path.write_bytes(broken if number % 3 else sound[:at])
            other = SessionStore(quick_path / f"other{number}", segment=4)
            try:
                assert other.import_archive(path) == identifier
            except StoreError:
                refused += 1
                assert other.list() == ()
            else:
                assert digest(other.restore(identifier)) == digest(Toy(5).step(self.steps).buffers())
        assert refused > 30

    @pytest.mark.parametrize(
        "how", ["path", "renamed", "link", "hard link", "more", "order", "less", "other", "text"]
    )
    def test_members_that_do_not_belong(self, store, quick_path, how) -> None:
        path = quick_path / "a.tar"
        self.exported(store, path)
        with tarfile.open(path) as archive:
            members = [(m, archive.extractfile(m).read()) for m in archive.getmembers()]
        evil = tarfile.TarInfo({"path": "../../evil"}.get(how, "f" * 64))
        evil.type = {"link": tarfile.SYMTYPE, "hard link": tarfile.LNKTYPE}.get(how, tarfile.REGTYPE)
        evil.linkname = "/etc/passwd"
        if how == "order":
            members[1], members[2] = members[2], members[1]
        elif how == "less":
            members.pop()
        elif how == "renamed":
            members[1][0].name = "../evil"
        elif how == "more":
            members.append((evil, b""))
        elif how == "other":
            members[1] = (members[1][0], bytes(members[1][0].size))
        else:
            members[1] = (evil, b"")
        with tarfile.open(path, "w") as archive:
            for member, content in members:
                archive.addfile(member, io.BytesIO(content))
        if how == "text":
            path.write_text("not a tar")
        other = SessionStore(quick_path / "other")
        with pytest.raises(StoreError, match="no sound archive"):
            other.import_archive(path)
        assert other.list() == ()
        assert not (quick_path / "evil").exists()

    def test_a_damaged_checkpoint_is_not_exported(self, store, quick_path) -> None:
        identifier = store.checkpoint(Toy().step(9))
        blob = next((store.path / "blobs").iterdir())
        blob.write_bytes(bytes(blob.stat().st_size))
        with pytest.raises(StoreError, match="damaged"):
            store.export_archive(identifier, quick_path / "a.tar")
        assert not (quick_path / "a.tar").exists()

    def test_missing_files_have_a_clear_error(self, store, quick_path) -> None:
        with pytest.raises(StoreError, match="No such file"):
            store.import_archive(quick_path / "absent.tar")


def test_sound_stores_warn_of_nothing(store) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.checkpoint(Toy())
        store.list()
        store.verify()
