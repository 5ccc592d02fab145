"""Saving leaves the old file or the new one: under kill, on a full disk, in a read-only folder."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import safetensors
from synthetic import equal, random_state

from statebridge.errors import StateFileError
from statebridge.state import HybridState
from statebridge.state import atomic as atomic_module
from statebridge.state import file as file_module

OLD, NEW = random_state([3], seed=1), random_state([6, 2], seed=2)

# One process, so that torch is imported once; it forks writers and kills them. Writers that die at a named
# point use os._exit, which runs no finally block, as a kill would.
KILLER = """
    import os, pathlib, random, signal, sys, time
    sys.path.insert(0, {tests!r})
    import torch
    torch.set_num_threads(1)
    from synthetic import equal, random_state
    from statebridge.state import HybridState
    old, new = random_state([3], seed=1), random_state([6, 2], seed=2)
    path = pathlib.Path({path!r})
    old.save(path)
    seen = {{"old": 0, "new": 0}}
    def check():
        state = HybridState.load(path)
        which = "old" if equal(state, old) else "new" if equal(state, new) else None
        assert which, "neither the old state nor the new one"
        seen[which] += 1
    def writer(action):
        pid = os.fork()
        if pid == 0:
            try:
                action()
            finally:
                os._exit(0)
        return pid
    def forever():
        while True:
            new.save(path)
            old.save(path)
    random.seed(7)
    for _ in range(40):
        pid = writer(forever)
        time.sleep(random.uniform(0.001, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        check()
    call, status = 0, 1
    while status != 0:  # die at the n-th operation on files, until n is more than there are
        call += 1
        def dying(call=call):
            left = [call]
            def hook(event, args):
                if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.chmod", "fcntl.flock"):
                    left[0] -= event == "fcntl.flock" or path.name in str(args[0])
                    if left[0] == 0:
                        os._exit(9)
            sys.addaudithook(hook)
            new.save(path)
        for left in path.parent.glob(".*.tmp"):
            os.utime(left, (0, 0))
        old.save(path)  # clears what dead writers left
        assert os.listdir(path.parent) == [path.name]
        _, status = os.waitpid(writer(dying), 0)
        check()
    print(seen["old"], seen["new"], call)
"""


def test_a_killed_writer_leaves_old_or_new(tmp_path) -> None:
    path = tmp_path / "s.safetensors"
    code = textwrap.dedent(KILLER).format(tests=str(Path(__file__).parent), path=str(path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    old, new, points = map(int, done.stdout.split())
    assert old + new == 40 + points
    assert points > 6
    assert old > 0  # both outcomes happen: the named points lie before and after the rename
    assert new > 0


def test_what_a_dead_writer_left_is_cleared(tmp_path) -> None:
    path, left = tmp_path / "s", tmp_path / ".s.0123.tmp"
    left.mkdir()
    (left / "s").write_bytes(b"half")
    OLD.save(path)
    assert left.exists()  # too young to be told from one that is about to be locked
    os.utime(left, (0, 0))
    OLD.save(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_living_writer_keeps_its_temporary_file(tmp_path) -> None:
    path = tmp_path / "s"
    with atomic_module.atomic_file(path) as slow:
        slow.write_bytes(b"half")
        os.utime(slow.parent, (0, 0))
        OLD.save(path)  # another writer of the same file
        assert slow.exists()
    assert path.read_bytes() == b"half"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), "wrapped"])
@pytest.mark.parametrize("where", ["write", "sync"])
def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch, error, where) -> None:
    path = tmp_path / "s"
    OLD.save(path)
    failure = safetensors.SafetensorError("No space left on device") if error == "wrapped" else error

    def fail(*args, **kwargs):
        raise failure

    if where == "write":
        monkeypatch.setattr(file_module, "save_file", fail)
    elif error == "wrapped":
        pytest.skip("only safetensors wraps")
    else:
        monkeypatch.setattr(atomic_module.os, "fsync", fail)
    with pytest.raises(StateFileError, match=r"cannot be written.*No space left"):
        NEW.save(path)
    monkeypatch.undo()
    assert equal(HybridState.load(path), OLD)
    assert list(tmp_path.iterdir()) == [path]


def test_everything_is_synced_in_order(tmp_path, monkeypatch) -> None:
    """Content before the rename, the folder after it."""
    log = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(handle):
        log.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        real_sync(handle)

    def replace(self, target):
        log.append(("replace", str(target)))
        return real_replace(self, target)

    monkeypatch.setattr(atomic_module.os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    path = tmp_path / "s"
    OLD.save(path)
    assert [event for event, _ in log] == ["sync", "replace", "sync"]
    assert log[0][1].endswith(f".tmp/{path.name}")
    assert log[1][1] == str(path)
    assert log[2][1] == str(tmp_path)


def test_folders_that_cannot_be_written(tmp_path, monkeypatch) -> None:
    with pytest.raises(StateFileError, match=r"cannot be written.*choose an existing folder"):
        OLD.save(tmp_path / "absent" / "s")
    with pytest.raises(StateFileError, match="cannot be written"):
        OLD.save(tmp_path)  # a folder is no file
    if os.geteuid() == 0:  # root may write anywhere, so the refusal is played
        monkeypatch.setattr(
            atomic_module.os,
            "open",
            lambda *a, **k: (_ for _ in ()).throw(PermissionError(13, "Permission denied")),
        )
    else:
        tmp_path.chmod(0o555)
    with pytest.raises(StateFileError, match="Permission denied"):
        OLD.save(tmp_path / "s")
    monkeypatch.undo()
    tmp_path.chmod(0o755)
    assert [p for p in tmp_path.iterdir() if p.is_file()] == []
