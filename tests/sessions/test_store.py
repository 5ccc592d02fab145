"""Checkpoints, forks and what they share. Equality is bit-exact, by digest over all buffers."""

from __future__ import annotations

import hashlib
import threading
import time

import numpy as np
import pytest
from toy import Toy, digest

from statebridge.errors import StoreError
from statebridge.sessions import Buffer, BufferKind, BufferSpec, SessionStore
from statebridge.sessions.chunks import BLOB_BYTES, LARGE_BYTES


class Given:
    """A session that holds exactly these buffers."""

    def __init__(self, *buffers: Buffer) -> None:
        self.given = buffers

    def buffers(self):
        return self.given

    def load(self, buffers) -> None:
        self.given = tuple(buffers)


@pytest.fixture
def store(quick_path) -> SessionStore:
    return SessionStore(quick_path / "store", segment=4)


def blobs(store: SessionStore) -> set[str]:
    return {path.name for path in (store.path / "blobs").iterdir()}


def test_a_restored_session_goes_on_like_one_that_never_left(store) -> None:
    toy = Toy(3).step(9)
    identifier = store.checkpoint(toy, label="nine steps")
    again = Toy(99).step(2)
    again.load(SessionStore(store.path).restore(identifier))
    assert digest(again.step(5).buffers()) == digest(toy.step(5).buffers())


def test_what_was_appended_does_not_store_the_prefix_again(store) -> None:
    toy = Toy().step(9)  # segments 0-3, 4-7, 8
    first = store.checkpoint(toy)
    before = blobs(store)
    store.checkpoint(toy.step(4), parent=first)  # segments 8-11 and 12 are new, and one blob of fixed buffers
    assert len(blobs(store) - before) == 3
    parent, child = (store.manifest(c.id) for c in store.list())
    shared = {ref.digest for ref in parent.blobs} & {ref.digest for ref in child.blobs}
    assert len(shared) == 2
    own = {c.id: c.own_nbytes for c in store.list()}
    assert own[first] == parent.nbytes - 8 * (2 * 3 * 4 + 8)  # all but eight entries of cache and tokens


def test_a_fork_copies_nothing_and_disturbs_nobody(store) -> None:
    toy = Toy().step(9)
    first = store.checkpoint(toy)
    before = blobs(store)
    forks = [store.fork(first, label=f"fork {i}") for i in range(3)]
    assert len({first, *forks}) == 4
    assert blobs(store) == before
    store.delete(first)
    store.gc()
    a, b = Toy(), Toy()
    a.load(store.restore(forks[0]))
    b.load(store.restore(forks[1]))
    later = store.checkpoint(a.step(3), parent=forks[0])
    assert digest(store.restore(forks[1])) == digest(b.buffers()) == digest(toy.buffers())
    assert [c.id for c in store.lineage(later)] == [later, forks[0]]  # the deleted ancestor ends the line
    assert store.lineage(later)[-1].parent == first
    with pytest.raises(StoreError, match="no checkpoint"):
        store.restore(first)


def test_only_what_nobody_names_is_collected(store) -> None:
    toy = Toy().step(5)
    first = store.checkpoint(toy)
    second = store.checkpoint(toy.step(4), parent=first)
    store.delete(first)
    (store.path / "temporary" / "0123").write_bytes(b"left behind")
    planned = store.gc(dry_run=True)
    assert planned.blobs == 2  # the half-filled segment and the fixed buffers
    assert planned.temporary == 1
    assert store.gc() == planned
    assert store.gc().nbytes == 0
    assert digest(store.restore(second)) == digest(toy.buffers())


def test_every_dtype_and_shape_comes_back(store) -> None:
    """Also those that numpy lacks, empty ones, scalars, and growth along any axis."""
    generator = np.random.default_rng(0)
    given = []
    for dtype, size in (("bfloat16", 2), ("float8_e4m3fn", 1), ("bool", 1), ("complex128", 16), ("int64", 8)):
        for shape, grows in (((), None), ((0, 3), 0), ((3, 0), 0), ((2, 9, 3), 1), ((9, 2), 0), ((2, 9), 1)):
            spec = BufferSpec(f"{dtype}.{len(given)}", BufferKind.LATENT, dtype, shape, grows, ("x",), 1.5)
            data = np.frombuffer(generator.bytes(int(np.prod(shape)) * size), np.uint8)
            given.append(Buffer(spec, data))
    restored = store.restore(store.checkpoint(Given(*given)))
    assert digest(restored) == digest(given)
    assert [b.spec for b in restored] == sorted((b.spec for b in given), key=lambda spec: spec.name)


def test_large_and_small_buffers_are_packed(store) -> None:
    """A large buffer is found again when the small ones beside it change."""
    large = Buffer.of("bank", BufferKind.RETRIEVAL, np.arange(BLOB_BYTES + LARGE_BYTES, dtype=np.uint8))
    first = store.checkpoint(Given(large, *(Buffer.of(f"z{i}", BufferKind.WINDOW, i) for i in range(50))))
    before = blobs(store)
    assert len(before) == 3
    second = store.checkpoint(
        Given(large, *(Buffer.of(f"z{i}", BufferKind.WINDOW, i + 1) for i in range(51)))
    )
    (new,) = blobs(store) - before
    assert (store.path / "blobs" / new).stat().st_size == 51 * 8
    assert digest(store.restore(first)) != digest(store.restore(second))


def test_buffers_of_other_lengths_do_not_spoil_sharing(store) -> None:
    def session(tokens: int, frames: int) -> Given:
        return Given(
            Buffer.of("kv", BufferKind.KV, np.arange(tokens * 3.0).reshape(tokens, 3), grows=0),
            Buffer.of("latents", BufferKind.LATENT, np.arange(frames * 5.0).reshape(frames, 5), grows=0),
        )

    store.checkpoint(session(8, 2))
    before = blobs(store)
    later = store.manifest(store.checkpoint(session(9, 3)))  # one more entry each
    (kv,) = (entry for entry in later.buffers if entry.spec.name == "kv")
    assert [later.blobs[chunk.blob].digest in before for chunk in kv.chunks] == [True, True, False]


def test_the_id_is_the_digest_of_the_manifest(store) -> None:
    identifier = store.checkpoint(Toy())
    raw = (store.path / "checkpoints" / identifier).read_bytes()
    assert hashlib.sha256(raw).hexdigest() == identifier
    assert store.checkpoint(Toy()) != identifier  # equal content, another checkpoint


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Buffer.of("../x", BufferKind.KV, 1), "no buffer name"),
        (lambda: Buffer.of("a" * 201, BufferKind.KV, 1), "no buffer name"),
        (lambda: Buffer.of("x", BufferKind.KV, np.array(["a"])), "unknown dtype"),
        (lambda: Buffer.of("x", BufferKind.KV, 1, grows=0), "grows along axis 0"),
        (lambda: Buffer.of("x", BufferKind.KV, 1, cost=float("inf")), "finite"),
        (lambda: Buffer.of("x", BufferKind.KV, 1, derivable_from=("a b",)), "no buffer name"),
        (
            lambda: Buffer(BufferSpec("x", BufferKind.KV, "int8", (3,)), np.zeros(2, np.uint8)),
            "needs 3 bytes",
        ),
        (lambda: BufferSpec("x", BufferKind.KV, "int8", (-1,)), "no array can have"),
        (lambda: Buffer.of("x", BufferKind.KV, 1.5).value(), "does not hold JSON"),
        (
            lambda: Buffer(BufferSpec("x", BufferKind.KV, "bfloat16", ()), np.zeros(2, np.uint8)).array(),
            "numpy",
        ),
    ],
)
def test_ill_formed_buffers_are_refused(make, message) -> None:
    with pytest.raises(StoreError, match=message):
        make()


def test_misuse_is_refused(store, tmp_path) -> None:
    twice = Given(Buffer.of("x", BufferKind.KV, 1), Buffer.of("x", BufferKind.KV, 2))
    cases = [
        (lambda: store.checkpoint(twice), "two buffers named x"),
        (lambda: store.checkpoint(Toy(), parent="f" * 64), "no checkpoint"),
        (lambda: store.checkpoint(Toy(), label="two\nlines"), "printable"),
        (lambda: store.restore("../../etc/passwd"), "no checkpoint id"),
        (lambda: store.delete("f" * 64), "no checkpoint"),
        (lambda: store.fork("f" * 64), "no checkpoint"),
        (lambda: store.lineage("f" * 64), "no checkpoint"),
        (lambda: SessionStore(store.path, segment=5), "segments of 4"),
        (lambda: SessionStore(tmp_path / "new", segment=0), "no use"),
        (lambda: SessionStore(tmp_path / "absent", create=False), "no session store"),
        (lambda: SessionStore(tmp_path / "absent" / "deeper"), "cannot be opened"),
    ]
    for attempt, message in cases:
        with pytest.raises(StoreError, match=message):
            attempt()
    assert store.list() == ()
    (tmp_path / "thesis.doc").write_text("mine")
    with pytest.raises(StoreError, match=r"thesis\.doc"):
        SessionStore(tmp_path)


def test_threads_share_a_store_and_gc_is_not_starved(store) -> None:
    """Readers overlap without a pause; gc, which needs the store alone, gets its turn all the same."""
    identifier = store.checkpoint(Toy().step(3))
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                with store._lock.held(alone=False):
                    time.sleep(0.05)
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(4)]
    for reader in readers:
        reader.start()
        time.sleep(0.013)  # so that some reader always holds the lock
    cleaner = threading.Thread(target=store.gc)
    cleaner.start()
    cleaner.join(timeout=5)
    starved = cleaner.is_alive()
    stop.set()
    for thread in (*readers, cleaner):
        thread.join()
    assert not starved
    assert not failures
    assert digest(store.restore(identifier)) == digest(Toy().step(3).buffers())
