"""Several processes on one store: no update is lost, nothing named is collected, no lock outlives its owner."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from toy import Toy

from statebridge.sessions import SessionStore

# One process, so that torch is imported once; it forks workers that run at the same time.
WORKERS = """
    import json, os, random, sys, time, traceback
    from toy import Toy, digest
    from statebridge.errors import StoreError
    from statebridge.sessions import SessionStore
    path = sys.argv[1]
    SessionStore(path, segment=4)
    start = time.time() + 0.2
    pipes = []
    for number in range(3):
        reader, writer = os.pipe()
        if os.fork() == 0:
            failed = True
            try:
                store, chance = SessionStore(path), random.Random(number)
                mine, gone = {}, []
                time.sleep(max(start - time.time(), 0))
                for turn in range(20):
                    # equal seeds, so that workers write and collect the same blobs all the time
                    toy = Toy(0).step(chance.randrange(1, 20))
                    fresh = store.checkpoint(toy, parent=chance.choice([None, *mine]))
                    mine[fresh] = digest(toy.buffers())
                    theirs = chance.choice(store.list()).id
                    try:
                        fork = store.fork(theirs)
                        mine[fork] = digest(store.restore(fork))
                    except StoreError as error:
                        assert "no checkpoint" in str(error), error
                    if chance.random() < 0.6:
                        old = chance.choice(list(mine))
                        store.delete(old)
                        gone.append(old)
                        del mine[old]
                    if chance.random() < 0.4:
                        store.gc()
                    for identifier in chance.sample(list(mine), min(len(mine), 3)):
                        assert digest(store.restore(identifier)) == mine[identifier]
                os.write(writer, json.dumps([mine, gone]).encode())
                failed = False
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(failed)
        os.close(writer)
        pipes.append(reader)
    expected, gone = {}, set()
    for reader in pipes:
        with os.fdopen(reader) as pipe:
            mine, deleted = json.loads(pipe.read())
        expected |= mine
        gone |= set(deleted)
    assert all(os.wait()[1] == 0 for _ in pipes)
    store = SessionStore(path)
    assert {c.id for c in store.list()} == set(expected)
    assert not gone & set(expected)
    store.gc()
    assert {c.id: digest(store.restore(c.id)) for c in store.list()} == expected
    assert not store.verify().problems
    print(len(expected), len(gone))
"""


@pytest.mark.slow
def test_processes_at_once_lose_nothing(quick_path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WORKERS), str(quick_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    kept, gone = map(int, done.stdout.split())
    assert kept > 10
    assert gone > 10


def test_a_lock_dies_with_its_owner(quick_path) -> None:
    store = SessionStore(quick_path / "store")
    hold = (
        "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, 2); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(store.path / "lock")], stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        owner.stdout.readline()
        made: list[str] = []
        waiting = threading.Thread(target=lambda: made.append(store.checkpoint(Toy())))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()  # while the owner lives
        owner.kill()
        waiting.join(20)
    assert [c.id for c in store.list()] == made
