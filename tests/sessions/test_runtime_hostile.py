"""A runtime among others that delete, clocks that jump, policies that err, moves that fail. Equality is bit-exact."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import tiny
import tiny_pair
import torch
from test_runtime import ROOM, fill, holds, runtime
from toy import Toy
from toy_runtime import RunningToy, ToyEngine

from statebridge.bridge import Bridge
from statebridge.capture import prefill
from statebridge.errors import BudgetError, CaptureError, ConfigError, StateMismatch, StoreError
from statebridge.sessions import LanguageEngine, SessionRuntime, SessionStore
from statebridge.sessions.policies import LRU, TTL, Pinned, PredictiveShrinking, Relevance
from statebridge.sessions.session import Buffer, BufferKind

# other users of one store


@pytest.mark.parametrize("leave", ["evict", "close", "checkpoint"])
def test_a_session_whose_checkpoint_was_deleted_elsewhere_is_stored_again(quick_path, leave) -> None:
    run = runtime(quick_path)
    twins = fill(run, 1)
    run.store.delete(run.checkpoint())
    given = getattr(run, leave)("s0")
    if leave == "evict":
        run.switch("s0")
    else:
        run = runtime(quick_path)
        run.open("s0", given)
    assert holds(run, twins)


def test_what_an_eviction_stored_is_not_taken_from_a_second_runtime_that_opened_it(quick_path) -> None:
    first, second = runtime(quick_path), runtime(quick_path)
    twins = fill(first, 1)
    first.evict("s0")
    second.open("s0")
    second.evict("s0")
    for _ in range(2):  # each eviction replaces what the last one stored
        first.switch("s0")
        first.step(1)
        first.evict("s0")
    second.switch("s0")
    assert holds(second, twins)
    assert holds(first, {"s0": twins["s0"].copy().step(2)})


def test_two_runtimes_on_one_session_lose_none_of_its_two_futures(quick_path) -> None:
    first = runtime(quick_path)
    twins = fill(first, 1)
    first.close()
    second = runtime(quick_path)
    for run in (first, second):
        run.open("s0")
    for steps, run in enumerate((first, second), 1):
        run.step(steps)
        run.evict("s0")
    assert holds(first, {"s0": twins["s0"].copy().step(1)})
    assert holds(second, {"s0": twins["s0"].copy().step(2)})


def test_a_new_session_does_not_take_the_name_of_a_stored_one(quick_path) -> None:
    """Deleting it would delete the stored one, and opening would find whichever is newer."""
    yesterday = runtime(quick_path)
    twins = fill(yesterday, 1)
    yesterday.close()
    run = runtime(quick_path)
    with pytest.raises(StoreError, match="has a session named s0 already; open it, or choose another name"):
        run.new("s0")
    run.new("other")
    with pytest.raises(StoreError, match="has a session named s0 already"):
        run.fork("other", "s0")
    run.open("s0")
    assert holds(run, twins)


def test_a_name_is_not_taken_for_the_mark_of_an_event(quick_path) -> None:
    run = runtime(quick_path)
    for name in ("a |", "a | b"):
        with pytest.raises(StoreError, match="no session name"):
            run.new(name)


def test_a_checkpoint_id_from_outside_is_no_path(quick_path) -> None:
    run = runtime(quick_path)
    secret = quick_path / "secret"
    secret.write_text("{}")
    for id in ("../../secret", str(secret), "", "0" * 63 + "\n"):
        with pytest.raises(StoreError):
            run.open("x", id)
    assert run.usage().active is None
    assert secret.read_text() == "{}"


# clocks


def test_the_newest_checkpoint_is_the_last_of_its_line_whatever_the_clock_says(
    quick_path, monkeypatch
) -> None:
    run = runtime(quick_path)
    twins = fill(run, 1)
    run.checkpoint()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    run.step(1)
    run.close()
    again = runtime(quick_path)
    again.open("s0")
    assert holds(again, {"s0": twins["s0"].step(1)})


def test_sessions_expire_although_the_clock_went_back(quick_path) -> None:
    now = [1000.0]
    run = runtime(quick_path, sessions=9, policy=TTL(10), clock=lambda: now[0])
    fill(run, 2)
    now[0] = 0.0
    run.step(0)  # the clock is seen at its new place
    now[0] = 11.0
    run.step(0)
    assert run.usage().on_disk == ("s0",)


def test_a_session_that_expired_and_cannot_leave_does_not_stop_the_others(quick_path) -> None:
    now = [0.0]
    run = SessionRuntime(ToyEngine(), None, 2 * ROOM, 9 * ROOM, TTL(10), clock=lambda: now[0])
    twins = fill(run, 2)
    now[0] = 11.0
    with pytest.warns(UserWarning, match="s0 cannot leave memory"):
        run.step(1)
    assert holds(run, twins | {"s1": twins["s1"].step(1)})


# policies


class Naming(LRU):
    """Wants somebody out who is not on the host."""

    def __init__(self, id: str) -> None:
        self.id = id

    def due(self, sessions, now, budget):
        return [self.id]


@pytest.mark.parametrize("id", ["s1", "nobody"])
def test_a_policy_that_wants_the_active_session_out_is_told(quick_path, id) -> None:
    run = runtime(quick_path, policy=Naming(id))
    twins: dict[str, Toy] = {}
    run._tiers.policy = LRU()
    twins = fill(run, 2)
    run._tiers.policy = Naming(id)
    with pytest.raises(ConfigError, match=f"Naming wants {id} out, which may not leave"):
        run.step(1)
    assert holds(run, twins)


def test_a_scorer_that_raises_or_gives_no_number_moves_nothing(quick_path) -> None:
    answer = [math.nan]

    def scorer(session):
        return answer[0] if answer else 1 / 0

    run = runtime(quick_path, policy=Relevance(scorer))
    twins = fill(run, 3)
    before = run.usage()
    with pytest.raises(ConfigError, match="relevance of s0 is nan"):
        run.new("s3")
    answer.clear()
    with pytest.raises(ZeroDivisionError):
        run.new("s3")
    assert run.usage() == before
    assert holds(run, twins)
    with pytest.raises(ConfigError, match="relevance of s0 is nan"):
        run.mark("s0", math.nan)
    with pytest.raises(ConfigError, match="relevance of child is nan"):
        run.fork("s0", "child", relevance=math.nan)


def test_what_a_rule_pins_is_not_evicted_by_hand_either(quick_path) -> None:
    run = runtime(quick_path, policy=Pinned(lambda session: session.id == "s0"))
    fill(run, 2)
    with pytest.raises(BudgetError, match="s0 is pinned"):
        run.evict("s0")
    assert run.usage().on_host == ("s0",)


def test_a_forecast_counts_pinned_sessions(quick_path) -> None:
    run = runtime(quick_path, sessions=3, policy=PredictiveShrinking(horizon=0))
    fill(run, 3)
    run.pin("s0")
    run.pin("s1")
    run.switch(None)
    assert run.usage().on_host == ("s0", "s1", "s2")
    run._tiers.budget = 3 * ROOM - 1  # one byte less than the three hold
    run.switch(None)
    assert run.usage().on_disk == ("s2",)


def test_settings_that_mean_nothing_are_refused() -> None:
    for attempt in (
        lambda: SessionRuntime(ToyEngine(), None, -1, 0),
        lambda: SessionRuntime(ToyEngine(), None, 0, -1),
        lambda: TTL(-1.0),
        lambda: TTL(math.nan),
        lambda: LanguageEngine(),
    ):
        with pytest.raises(ConfigError):
            attempt()


# what fails on the way


def test_going_back_to_a_checkpoint_that_is_gone_keeps_what_is_in_memory(quick_path) -> None:
    run = runtime(quick_path)
    twins = fill(run, 1)
    run.store.delete(run.checkpoint())
    run.step(1)
    with pytest.raises(StoreError, match="no checkpoint"):
        run.revert("s0")
    assert holds(run, {"s0": twins["s0"].step(1)})
    assert run.usage().active == "s0"


def test_a_fork_that_fails_leaves_neither_a_child_nor_its_name(quick_path) -> None:
    run = runtime(quick_path)
    twins = fill(run, 2)
    run.switch("s0")
    run.step(5)
    twins["s0"].step(5)
    run.evict("s0")
    run.switch("s1")
    run._tiers.device_budget = ROOM
    for _ in range(2):
        with pytest.raises(BudgetError, match="on the device"):
            run.fork("s0", "child", switch=True)
    assert [c.label for c in run.store.list()] == ["s0 | evicted"]
    run._tiers.device_budget = 2 * ROOM
    run.switch("s0")
    run.step(1)
    run.evict("s0")
    assert len(run.store.list()) == 1  # nothing holds on to what was stored before
    run.fork("s0", "child")
    assert holds(run, twins | {"s0": twins["s0"].step(1), "child": twins["s0"]})


def test_a_deletion_that_fails_can_be_tried_again(quick_path, monkeypatch) -> None:
    run = runtime(quick_path)
    twins = fill(run, 1)
    run.checkpoint()
    with monkeypatch.context() as patch:

        def fails(id: str) -> None:
            raise StoreError("the folder is read-only")

        patch.setattr(run.store, "delete", fails)
        with pytest.raises(StoreError, match="read-only"):
            run.delete("s0")
    assert holds(run, twins)
    run.delete("s0")
    assert run.store.list() == ()


class Drawing(RunningToy):
    """Draws for every buffer that it loads but the generator's own, as initialisers do."""

    def load(self, buffers):
        for buffer in buffers:
            if buffer.spec.kind is BufferKind.RANDOM:
                self.random.bit_generator.state = buffer.value()
            else:
                self.random.standard_normal()
                if buffer.name == "layer.0.cache":
                    self.cache = buffer.array().copy()
                elif buffer.name == "clock":
                    self.clock = int(buffer.array())
                else:
                    setattr(self, buffer.name, buffer.array().copy())
        self.on_device = False


@pytest.mark.parametrize("way", ["disk", "fork"])
def test_random_states_are_given_last(quick_path, way) -> None:
    """A store gives buffers by name, and `tokens` comes after `random`."""
    run = runtime(quick_path)
    run._tiers.engine.fresh = lambda seed=0: Drawing(seed)
    twins = fill(run, 1)
    if way == "fork":
        run.fork("s0", "s0 too", switch=True)
        twins = {"s0 too": twins["s0"]}
    else:
        run.evict("s0")
        run.switch("s0")
    assert holds(run, twins)


# chats


def test_a_chat_that_could_not_go_back_onto_the_device_forgets_nothing(monkeypatch) -> None:
    """A generation fails because the device is full, and so does the way back."""
    model = tiny.build("qwen3_5")
    run, twin = (SessionRuntime(model, None, 10**8, 10**8) for _ in range(2))
    for one in (run, twin):
        one.new("a")
        one.step(tiny.ids(1, 6))
    with monkeypatch.context() as patch:
        patch.setattr("statebridge.sessions.runtime_chat.generate_from", lambda *a, **o: 1 / 0)
        patch.setattr("statebridge.sessions.runtime_chat.restore", lambda *a, **o: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.generate(tiny.ids(1, 1), max_new_tokens=2)
    more = tiny.ids(1, 2, seed=3)
    assert torch.equal(run.step(more), twin.step(more))


def test_tokens_that_are_none_do_not_break_a_chat() -> None:
    """A pass that fails in the middle costs all turns since the last checkpoint; a typing error must not."""
    model = tiny.build("qwen3_5")
    run, twin = (SessionRuntime(model, None, 10**8, 10**8) for _ in range(2))
    for one in (run, twin):
        one.new("a")
        one.step(tiny.ids(1, 6))
    bad = torch.tensor([[1, tiny.VOCAB]]), torch.tensor([[-1]]), torch.ones(1, 2, dtype=torch.bool), [[1, 2]]
    for ids in (*bad, torch.zeros(0, 3, dtype=torch.int64)):
        for attempt in (run.step, lambda ids: run.generate(ids, max_new_tokens=2)):
            with pytest.raises(CaptureError):
                attempt(ids)
        with pytest.raises(CaptureError):
            run.new("b", pending=ids)
    more = tiny.ids(1, 2, seed=3)
    assert torch.equal(run.step(more), twin.step(more))


def test_buffers_that_make_no_chat_are_refused() -> None:
    session = LanguageEngine(tiny.build("qwen3_5")).fresh()
    for buffers in ([], [b for b in session.buffers() if b.name == "nothing"]):
        with pytest.raises(StoreError, match="do not make a chat"):
            session.load(buffers)
    on_a_gpu = Buffer.of("generator.sampling", BufferKind.RANDOM, np.zeros(16, np.uint8))
    with pytest.raises(StateMismatch, match=r"another kind of device than cpu.*expected 5056, found 16"):
        session.load([on_a_gpu])


def test_padded_rows_go_through_the_disk_bit_for_bit(quick_path) -> None:
    """Two rows of which one is padded on the left, forked and brought back by a second runtime."""
    model = tiny.build("qwen3_5")
    ids, mask = tiny.ids(2, 7), torch.ones(2, 7, dtype=torch.int64)
    mask[1, :3] = 0
    state = prefill(model, ids, mask).state()
    store = SessionStore(quick_path / "store", segment=4)
    run = SessionRuntime(model, store, 10**8, 0)
    run.new("rows", state=state)
    more = tiny.ids(2, 2, seed=3)
    run.fork("rows", "child")
    run.close("rows")
    run.switch("child")
    here = run.step(more)
    again = SessionRuntime(model, store, 10**8, 0)
    again.open("rows")
    assert torch.equal(again.step(more), here)
    unpadded = prefill(model, ids, torch.ones_like(mask)).state()
    again.new("unpadded", state=unpadded)
    assert not torch.equal(again.step(more)[1], here[1])


def test_a_chat_handed_over_then_forked_and_evicted_samples_on_in_a_second_runtime(quick_path) -> None:
    """The random state crosses the hand-over, the fork and the disk; what was pending does too."""
    pair = tiny_pair.pair()
    bridge = Bridge.direct(pair.source_identity, pair.receiver_identity)
    ids, sampled = tiny_pair.ids_of(), {"do_sample": True, "temperature": 3.0, "top_k": 0}
    store = SessionStore(quick_path / "store", segment=4)
    run = SessionRuntime(pair.source, store, 10**8, 0)
    run.new("chat", seed=7)
    run.generate(ids, max_new_tokens=3, **sampled)
    drawn, pending = run.active._rest.generators["sampling"].get_state(), run.active.pending
    run.handoff(pair.receiver, bridge=bridge)
    assert torch.equal(run.active._rest.generators["sampling"].get_state(), drawn)
    assert torch.equal(run.active.pending, pending)
    run.fork("chat", "child")
    here = run.generate(max_new_tokens=6, **sampled).new_ids
    run.fork("chat", "later")
    after = run.generate(max_new_tokens=6, **sampled).new_ids
    run.close()
    again = SessionRuntime(LanguageEngine(pair.source, pair.receiver), store, 10**8, 0)
    for name, expected in (("child", here), ("later", after)):
        again.open(name)
        found = again.generate(max_new_tokens=6, **sampled)
        assert torch.equal(found.new_ids, expected)
        assert found.prefix_tokens_processed == 0
    assert not torch.equal(here, after)
