"""Whatever is killed, torn, reordered or refused: the old checkpoints or the new ones, and all acknowledged.

Equality is by digest over all buffers, so bit-exact.
"""

from __future__ import annotations

import errno
import functools
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from crash import Failing, Op, Recorder, crashes, read_disk, write_disk
from toy import Toy, digest

from statebridge.errors import StoreError
from statebridge.sessions import SessionStore


class Dying(Recorder):
    """Dies before it syncs a folder."""

    def sync_folder(self, folder: str) -> None:
        raise OSError(errno.EIO, "killed")


class Script:
    """A life of a store, one acknowledged operation after the other."""

    def __init__(self, store: SessionStore) -> None:
        self.store = store
        self.there: dict[str, str] = {}  # id -> digest of its buffers
        self.toy = Toy(1).step(5)

    def checkpoint(self, parent: str | None = None, steps: int = 0) -> str:
        self.toy.step(steps)
        identifier = self.store.checkpoint(self.toy, parent=parent)
        self.there[identifier] = digest(self.toy.buffers())
        return identifier

    def fork(self, parent: str) -> str:
        identifier = self.store.fork(parent)
        self.there[identifier] = self.there[parent]
        return identifier

    def delete(self, identifier: str) -> None:
        self.store.delete(identifier)
        del self.there[identifier]

    def run(self, after: object = lambda: None) -> None:
        acknowledge = after if callable(after) else lambda: None
        first = self.checkpoint()
        acknowledge()
        second = self.checkpoint(first, steps=6)
        acknowledge()
        fork = self.fork(second)
        acknowledge()
        self.delete(first)
        acknowledge()
        self.store.gc()
        acknowledge()
        self.delete(second)
        acknowledge()
        self.checkpoint(fork, steps=1)
        acknowledge()
        self.store.gc()
        acknowledge()


def holds(root: Path, allowed: list[dict[str, str]]) -> None:
    """The store in `root` opens and holds exactly one of the allowed sets, all of it readable."""
    store = SessionStore(root)
    found = {c.id: digest(store.restore(c.id)) for c in store.list()}
    assert found in allowed
    assert store.verify().problems == ()


def test_every_crash_leaves_old_or_new(quick_path) -> None:
    live = quick_path / "live"
    SessionStore(live, segment=4)
    base = read_disk(live)
    ops: list[Op] = []
    script = Script(SessionStore(live, files=functools.partial(Recorder, ops=ops)))
    stages: list[tuple[int, dict[str, str]]] = [(0, {})]
    script.run(lambda: stages.append((len(ops), dict(script.there))))
    last_index = (live / "index.sqlite").read_bytes() if (live / "index.sqlite").exists() else b""
    tried: dict[object, list[dict[str, str]]] = {}
    for count in range(len(ops) + 1):
        before = max(stage for stage in stages if stage[0] <= count)
        after = min((stage for stage in stages if stage[0] >= count), key=lambda stage: stage[0])
        for disk in crashes(base, ops[:count]):
            key = frozenset(disk.items())
            allowed = [before[1], after[1]]
            if allowed in tried.setdefault(key, []):
                continue
            tried[key].append(allowed)
            root = quick_path / "crashed"
            write_disk(root, disk)
            (root / "index.sqlite").write_bytes(last_index)  # the index of another moment
            holds(root, allowed)
            if count % 7 == 0:  # life goes on
                again = Script(SessionStore(root))
                kept = {c.id for c in again.store.list()}
                fresh = again.checkpoint(parent=min(kept, default=None))
                again.store.gc()
                assert {c.id for c in again.store.list()} == kept | {fresh}
                assert again.store.verify().problems == ()
            shutil.rmtree(root)
    assert len(tried) > 100  # else the recorder saw nothing


def test_a_deletion_that_was_not_synced_does_not_come_back_without_its_content(quick_path) -> None:
    """One process dies between removing a manifest and syncing; another collects; then the power fails."""
    live = quick_path / "live"
    script = Script(SessionStore(live, segment=4))
    first, second = script.checkpoint(), script.checkpoint(steps=3)
    base, before = read_disk(live), dict(script.there)
    ops: list[Op] = []

    with pytest.raises(StoreError, match="killed"):
        SessionStore(live, files=functools.partial(Dying, ops=ops)).delete(first)
    SessionStore(live, files=functools.partial(Recorder, ops=ops)).gc()
    assert [op.what for op in ops].count("unlink") > 1
    for count in range(len(ops) + 1):
        for disk in crashes(base, ops[:count]):
            write_disk(quick_path / "crashed", disk)
            holds(quick_path / "crashed", [before, {second: before[second]}])
            shutil.rmtree(quick_path / "crashed")


def test_content_that_another_process_did_not_sync_is_synced(quick_path) -> None:
    """One process dies after it wrote blobs; another finds them there, and acknowledges a checkpoint of them."""
    live = quick_path / "live"
    SessionStore(live, segment=4)
    base = read_disk(live)
    ops: list[Op] = []
    toy = Toy().step(9)
    with pytest.raises(StoreError, match="killed"):
        SessionStore(live, files=functools.partial(Dying, ops=ops)).checkpoint(toy)
    written = [op.what for op in ops].count("write")
    identifier = SessionStore(live, files=functools.partial(Recorder, ops=ops)).checkpoint(toy)
    assert [op.what for op in ops].count("write") == written + 1  # the manifest alone
    for disk in crashes(base, ops):
        write_disk(quick_path / "crashed", disk)
        holds(quick_path / "crashed", [{identifier: digest(toy.buffers())}])
        shutil.rmtree(quick_path / "crashed")


def test_an_unfinished_creation_is_finished(quick_path) -> None:
    ops: list[Op] = []
    SessionStore(quick_path / "live", segment=4, files=functools.partial(Recorder, ops=ops))
    for count in range(len(ops) + 1):
        for number, disk in enumerate(crashes({}, ops[:count])):
            root = quick_path / f"{count}-{number}"
            write_disk(root, disk)
            store = SessionStore(root, segment=4)
            identifier = store.checkpoint(Toy().step(3))
            assert digest(store.restore(identifier)) == digest(Toy().step(3).buffers())
    assert all("store.json" in disk for disk in crashes({}, ops))  # once it was made, it stays


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_the_nth_operation_fails(quick_path, error) -> None:
    """Every failure is a StoreError; what was there stays, and the same call succeeds afterwards."""
    messages = []
    for n in range(1, 1000):
        root = quick_path / str(n)
        SessionStore(root, segment=4)
        left = [n]
        script = Script(SessionStore(root, files=functools.partial(Failing, left=left, error=error)))
        try:
            script.run()
        except StoreError as failure:
            messages.append(str(failure).replace(str(root), "ROOT"))
        else:
            break
        store = SessionStore(root)
        there = {c.id: digest(store.restore(c.id)) for c in store.list()}
        # the operation that failed may have been done or not; nothing else may differ
        assert len(set(there.items()) ^ set(script.there.items())) <= 1
        assert store.verify().problems == ()
        assert not list((root / "temporary").iterdir())  # only a kill leaves something behind
        assert digest(store.restore(store.checkpoint(script.toy))) == digest(script.toy.buffers())
        shutil.rmtree(root)
    assert len(messages) > 40
    remedy = {errno.ENOSPC: "free some space", errno.EROFS: "choose a folder", errno.EIO: "check the disk"}[
        error
    ]
    assert all(m.startswith("ROOT cannot ") and remedy in m for m in messages)


def test_a_folder_that_may_only_be_read(tmp_path) -> None:
    """Restoring, listing and verifying work; writing is refused with the remedy."""
    store = SessionStore(tmp_path / "s", segment=4)
    toy = Toy().step(9)
    identifier = store.checkpoint(toy)
    sandbox = [sys.executable, "-c", textwrap.dedent(READER), str(tmp_path / "s"), identifier]
    done = subprocess.run(sandbox, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [digest(toy.buffers()), "1", "0", "refused"]


# root may write anywhere, so the process gives up that right before it touches the store
READER = """
    import os, sys, warnings
    from toy import Toy, digest
    from statebridge.errors import StoreError
    from statebridge.sessions import SessionStore
    path, identifier = sys.argv[1:]
    for folder, _, names in os.walk(path):
        for name in names:
            os.chmod(os.path.join(folder, name), 0o444)
        os.chmod(folder, 0o555)
    parent = os.path.dirname(path)
    while parent not in ("/", "/tmp"):
        os.chmod(parent, 0o755)
        parent = os.path.dirname(parent)
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    store = SessionStore(path, create=False)
    print(digest(store.restore(identifier)), len(store.list()), len(store.verify().problems))
    try:
        store.checkpoint(Toy())
    except StoreError as error:
        assert "choose a folder where you may write" in str(error), error
        print("refused")
"""

# One process, so that torch is imported once; it forks writers and kills them.
KILLER = """
    import json, os, pathlib, random, signal, sys, time
    from toy import Toy, digest
    from statebridge.sessions import SessionStore
    path = sys.argv[1]
    SessionStore(path, segment=4)
    random.seed(3)
    acknowledged, deleted, killed = {}, set(), 0
    for round in range(8):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            random.seed(round)
            store, toy = SessionStore(path), Toy(round)
            last = None
            while True:
                toy.step(2)
                fresh = store.checkpoint(toy, parent=last)
                os.write(writer, (json.dumps(["+", fresh, digest(toy.buffers())]) + "\\n").encode())
                if last is not None and random.random() < 0.5:
                    os.write(writer, (json.dumps(["?", last, ""]) + "\\n").encode())
                    store.delete(last)
                    os.write(writer, (json.dumps(["-", last, ""]) + "\\n").encode())
                if random.random() < 0.3:
                    store.gc()
                last = fresh
        os.close(writer)
        maybe = set()
        with os.fdopen(reader) as lines:
            left = random.randrange(1, 6)
            for what, identifier, content in map(json.loads, lines):
                if what == "+":
                    acknowledged[identifier] = content
                    left -= 1
                    if left == 0:
                        time.sleep(random.uniform(0, 0.03))
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                elif what == "?":
                    maybe.add(identifier)
                else:
                    maybe.discard(identifier)
                    acknowledged.pop(identifier)
        store = SessionStore(path)
        there = {c.id: digest(store.restore(c.id)) for c in store.list()}
        for identifier in maybe - set(there):
            acknowledged.pop(identifier)
        assert acknowledged.items() <= there.items(), "an acknowledged checkpoint is gone or changed"
        assert len(there) <= len(acknowledged) + round + 1  # and one in flight for each kill
        assert not store.verify().problems
        killed += bool(os.listdir(path + "/temporary"))
    store.gc()
    assert not os.listdir(path + "/temporary")
    print(killed)
"""


@pytest.mark.slow
def test_killed_writers_keep_what_they_acknowledged(tmp_path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLER), str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0  # some writer died with a temporary file in place
