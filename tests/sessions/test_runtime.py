"""A runtime of toys: what is promised when memory is short, a disk fails, or a step does. Equality is bit-exact."""

from __future__ import annotations

import errno
import functools
import gc
import weakref

import pytest
from crash import Failing, Recorder, crashes, read_disk, write_disk
from toy import Toy, digest
from toy_runtime import ToyEngine, content, size

from statebridge.errors import BudgetError, StatebridgeError, StoreError
from statebridge.sessions import SessionRuntime, SessionStore
from statebridge.sessions.policies import TTL, Pinned, Relevance

ROOM = size(10)


def runtime(path, sessions: int = 2, files=None, **options) -> SessionRuntime:
    """A runtime whose host holds so many toys of ten steps."""
    path.mkdir(exist_ok=True)
    store = SessionStore(path / "store", segment=4, **({} if files is None else {"files": files}))
    return SessionRuntime(ToyEngine(), store, 2 * ROOM, sessions * ROOM, **options)


def fill(run: SessionRuntime, count: int, steps: int = 10) -> dict[str, Toy]:
    """Sessions s0, s1, …, each after its steps, and what they must hold."""
    for i in range(count):
        run.new(f"s{i}", seed=i)
        run.step(steps)
    return {f"s{i}": Toy(i).step(steps) for i in range(count)}


def holds(run: SessionRuntime, twins: dict[str, Toy]) -> bool:
    return all(digest(content(run, id)) == digest(toy.buffers()) for id, toy in twins.items())


def test_one_is_on_the_device_and_the_host_keeps_to_its_budget(quick_path) -> None:
    run = runtime(quick_path)
    twins = fill(run, 6)
    usage = run.usage()
    assert (usage.active, usage.on_host, usage.on_disk) == ("s5", ("s3", "s4"), ("s0", "s1", "s2"))
    assert (usage.device, usage.host) == (ROOM, 2 * ROOM)
    assert holds(run, twins)
    for i in (0, 4, 1, 0):
        run.switch(f"s{i}")
        run.step(1)
        twins[f"s{i}"].step(1)
        assert holds(run, twins)
    assert [toy.on_device for toy in run._tiers.engine.made].count(True) == 1


def test_what_left_memory_is_not_held_any_more(quick_path) -> None:
    """Without the help of the garbage collector, which frees memory some day."""
    run = runtime(quick_path)
    fill(run, 3)
    watched = [weakref.ref(toy) for toy in run._tiers.engine.made]
    run._tiers.engine.made.clear()
    gc.disable()
    try:
        run.new("s3")
        run.step(10)
        run.evict("s1")
        run.delete("s2")
        assert [ref() is None for ref in watched] == [True, True, True]
    finally:
        gc.enable()


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_a_fork_goes_its_own_way_wherever_its_parent_is(quick_path, where) -> None:
    run = runtime(quick_path)
    twins = fill(run, 1)
    if where == "host":
        run.switch(None)
    if where == "disk":
        run.evict("s0")
    run.fork("s0", "child")
    twins["child"] = twins["s0"].copy()
    assert holds(run, twins)
    run.switch("child")
    run.active.cache[...] = 5  # aliasing would show even where nobody writes in place
    run.step(1)
    assert holds(run, {"s0": twins["s0"]})
    run.switch("s0")
    run.step(2)
    assert holds(run, {"s0": twins["s0"].step(2)})


def test_pinned_sessions_stay_and_a_full_budget_is_said_not_waited_for(quick_path) -> None:
    run = runtime(quick_path)
    twins = fill(run, 3)
    run.pin("s0")
    run.pin("s1")
    run.pin("s2")
    before = run.usage()
    with pytest.raises(BudgetError, match=r"pinned \(s0, s1, s2\); unpin one, or raise host_budget"):
        run.new("s3")
    with pytest.raises(BudgetError, match="s0 is pinned"):
        run.evict("s0")
    assert run.usage() == before
    run.pin("s1", False)
    run.new("s3")
    assert run.usage().on_disk == ("s1",)
    assert holds(run, twins)


def test_one_that_never_fits_on_the_host_does_not_drive_the_others_out(quick_path) -> None:
    run = runtime(quick_path, sessions=1)
    fill(run, 2)
    run.step(4)  # s1 is now larger than the host
    run.switch(None)
    assert (run.usage().on_host, run.usage().on_disk) == (("s0",), ("s1",))


def test_a_step_that_would_not_fit_on_the_device_changes_nothing(quick_path) -> None:
    run = runtime(quick_path)
    twins = fill(run, 1)
    with pytest.raises(BudgetError, match="needs 1320 bytes on the device, and the budget is 720"):
        run.step(30)
    assert holds(run, twins)
    run.step(10)
    assert holds(run, {"s0": twins["s0"].step(10)})


def test_a_step_that_failed_half_way_is_never_stored(quick_path) -> None:
    run = runtime(quick_path)
    twins = fill(run, 1)
    good = run.checkpoint()
    run.active.failing = "step"
    with pytest.raises(RuntimeError, match="step fails"):
        run.step(1)
    for attempt in (run.step, run.checkpoint, run.close, lambda: run.fork("s0", "x")):
        with pytest.raises(StoreError, match="half written; revert it"):
            attempt()
    run.new("other")  # which puts the broken one away
    with pytest.raises(StoreError, match="half written"):
        run.switch("s0")
    assert [c.id for c in run.store.list()] == [good]
    run.revert("s0")
    run.switch("s0")
    assert holds(run, twins)


def test_a_broken_session_that_was_never_stored_is_said_to_be_gone(quick_path) -> None:
    run = runtime(quick_path)
    run.new("a")
    run.active.failing = "step"
    with pytest.raises(RuntimeError):
        run.step(1)
    with pytest.raises(StoreError, match="nothing to go back to; delete it"):
        run.revert("a")
    run.delete("a")
    run.new("a")


@pytest.mark.parametrize("hook", ["prepare", "release"])
@pytest.mark.parametrize("came_from", ["host", "disk"])
def test_a_move_that_fails_leaves_every_session_somewhere(quick_path, hook, came_from) -> None:
    run = runtime(quick_path)
    twins = fill(run, 2)
    if came_from == "disk":
        run.evict("s0")
    for toy in run._tiers.engine.made:
        toy.failing = hook
    fresh = run._tiers.engine.fresh

    def failing_fresh(**begin):
        toy = fresh(**begin)
        toy.failing = hook
        return toy

    run._tiers.engine.fresh = failing_fresh
    with pytest.raises(RuntimeError, match=hook):
        run.switch("s0")
    assert holds(run, twins)
    assert run.usage().host <= 2 * ROOM
    run._tiers.engine.fresh = fresh
    for toy in run._tiers.engine.made:
        toy.failing = None
    run.switch("s0")
    run.step(1)
    assert holds(run, twins | {"s0": twins["s0"].step(1)})


def test_whatever_operation_of_the_disk_fails_nothing_is_lost(quick_path) -> None:
    """The n-th write fails while sessions move; the call says so, and all go on where they are."""
    messages = []
    for n in range(1, 200):
        left = [0]
        run = runtime(quick_path / str(n), 1, functools.partial(Failing, left=left, error=errno.ENOSPC))
        twins = fill(run, 2)
        left[0] = n
        done = False
        try:
            run.new("s2", seed=2)  # s0 must leave
            run.fork("s1", "child")  # s1 or the child must leave
            run.checkpoint()
            run.switch("s0")
            done = True
        except StoreError as error:
            messages.append(str(error))
        there = set(run._tiers.records)
        assert {"s0", "s1"} <= there
        twins |= {id: {"s2": Toy(2), "child": twins["s1"]}[id] for id in there - {"s0", "s1"}}
        assert holds(run, twins)
        assert run.usage().host <= ROOM
        left[0] = 0
        run.switch("s1")
        assert holds(run, twins)
        if done:
            break
    assert len(messages) > 20
    assert all("free some space" in message for message in messages)


def test_a_crash_loses_nothing_that_was_acknowledged(quick_path) -> None:
    """Power fails at every file operation; a session counts from when a call says that it is on disk."""
    SessionStore(quick_path / "store", segment=4)
    base = read_disk(quick_path / "store")
    ops: list = []
    run = runtime(quick_path, 1, functools.partial(Recorder, ops=ops))
    twins = {id: digest(toy.buffers()) for id, toy in fill(run, 2).items()}
    stages: list[tuple[int, tuple[str, ...]]] = []
    for act in (
        lambda: run.new("s2", seed=2),
        lambda: run.switch("s0"),
        lambda: run.step(0),  # another eviction replaces what the first one stored
        lambda: run.switch("s1"),
        lambda: run.evict("s1"),
    ):
        act()
        stages.append((len(ops), run.usage().on_disk))
    tried = 0
    for count in range(len(ops) + 1):
        safe = [disk for at, disk in stages if at <= count]
        for disk in crashes(base, ops[:count]):
            write_disk(quick_path / "crashed" / "store", disk)
            after = runtime(quick_path / "crashed")
            for id in safe[-1] if safe else ():
                if id in twins:
                    after.open(id)
                    assert digest(after.active.buffers()) == twins[id]
                    tried += 1
            for path in (quick_path / "crashed" / "store").rglob("*"):
                if path.is_file():
                    path.unlink()
    assert tried > 100


def test_evictions_replace_each_other_and_what_was_asked_for_stays(quick_path) -> None:
    run = runtime(quick_path)
    fill(run, 1)
    asked = run.checkpoint()
    for _ in range(3):
        run.step(1)
        run.evict("s0")
        run.switch("s0")
    run.fork("s0", "child")  # goes through the latest of them, which stays from now on
    base = run.lineage("s0")[0].id
    run.step(1)
    run.evict("s0")
    run.evict("child")
    assert [c.id for c in run.lineage("s0")][1:] == [base, asked]
    assert [c.id for c in run.lineage("child")][1:] == [base, asked]
    assert len(run.store.list()) == 4
    before = len(run.store.list())
    run.switch("s0")
    run.switch("child")
    run.evict("s0")
    run.evict("child")
    assert len(run.store.list()) == before  # neither had changed


def test_sessions_are_opened_by_name_in_another_runtime(quick_path) -> None:
    run = runtime(quick_path)
    twins = fill(run, 2)
    first = run.checkpoint("s0")
    run.switch("s0")
    run.step(3)
    twins["s0"].step(3)
    for id in twins:
        run.close(id)
    with pytest.raises(StoreError, match="no session s0; open it"):
        run.switch("s0")
    again = runtime(quick_path)
    for id in twins:
        again.open(id)
    assert holds(again, twins)
    with pytest.raises(StoreError, match="is open already"):
        again.open("s0")
    again.delete("s0")
    with pytest.raises(StoreError, match="no session named s0"):
        again.open("s0")
    with pytest.raises(StoreError, match="no checkpoint"):
        again.open("older", first)
    assert holds(again, {"s1": twins["s1"]})


def test_an_older_checkpoint_can_be_opened_under_another_name(quick_path) -> None:
    run = runtime(quick_path)
    fill(run, 1)
    first = run.checkpoint()
    run.step(5)
    run.open("then", first)
    assert holds(run, {"then": Toy(0).step(10), "s0": Toy(0).step(15)})


def test_sessions_expire_without_pressure(quick_path) -> None:
    now = [0.0]
    run = runtime(quick_path, sessions=9, policy=TTL(10), clock=lambda: now[0])
    twins = fill(run, 3)
    run.pin("s1")
    now[0] = 11
    run.step(1)
    assert (run.usage().on_host, run.usage().on_disk) == (("s1",), ("s0",))
    assert holds(run, twins | {"s2": twins["s2"].step(1)})


def test_without_a_disk_nothing_is_given_up_unless_that_was_asked_for(quick_path) -> None:
    strict = SessionRuntime(ToyEngine(), None, 2 * ROOM, ROOM)
    twins = fill(strict, 2)
    with pytest.raises(BudgetError, match="the runtime has no store"):
        strict.new("s2")
    with pytest.raises(BudgetError, match="no store"):
        strict.checkpoint()
    assert holds(strict, twins)
    lossy = SessionRuntime(ToyEngine(), None, 2 * ROOM, ROOM, Relevance(), may_lose=True)
    fill(lossy, 1)
    lossy.mark("s0", 1)
    lossy.new("s1")
    lossy.step(10)
    lossy.new("s2")
    assert (lossy.usage().on_host, lossy.usage().lost) == (("s0",), ("s1",))
    with pytest.raises(StoreError, match="s1 was given up when memory was short"):
        lossy.switch("s1")


def test_a_rule_can_pin(quick_path) -> None:
    run = runtime(quick_path, policy=Pinned(lambda session: session.id in ("s0", "s1")))
    fill(run, 4)
    run.switch(None)
    assert run.usage().on_disk == ("s2", "s3")


def test_misuse_is_refused(quick_path) -> None:
    run = runtime(quick_path)
    cases = [
        (lambda: run.step(1), "No session is on the device"),
        (lambda: run.switch("x"), "no session x"),
        (lambda: run.new(""), "no session name"),
        (lambda: run.new("a | b"), "no session name"),
        (lambda: run.new("a\nb"), "no session name"),
        (lambda: run.open("x"), "no session named x"),
        (lambda: SessionRuntime(ToyEngine(), None, 1, 1).open("x"), "no store"),
    ]
    for attempt, message in cases:
        with pytest.raises(StoreError, match=message):
            attempt()
    run.new("a")
    for verb in (run.generate, lambda: run.handoff(None, bridge=None)):
        with pytest.raises(StatebridgeError, match="of a kind that cannot"):
            verb()
    with pytest.raises(StoreError, match="open already"):
        run.fork("a", "a")
