"""Chats of a tiny hybrid model under a runtime. Equality is bit-exact: moves change neither numbers nor schedule."""

from __future__ import annotations

import functools
import gc
import itertools

import pytest
import tiny
import tiny_pair
import torch
from crash import Failing
from torch.nn.functional import log_softmax

from statebridge.bridge import Bridge
from statebridge.capture import continue_from, generate_from, identity_of, prefill
from statebridge.errors import BudgetError, CaptureError, StateMismatch, StoreError
from statebridge.sessions import LanguageEngine, SessionRuntime, SessionStore

SAMPLED = {"do_sample": True, "temperature": 3.0, "top_k": 0}
ROOMY = 10**8


@pytest.fixture
def store(quick_path) -> SessionStore:
    return SessionStore(quick_path / "store", segment=4)


@pytest.fixture
def model():
    return tiny.build("qwen3_5")


def chat(run: SessionRuntime, turn: int) -> list[int]:
    """A turn of the active session: read, then sample."""
    run.step(tiny.ids(1, 3, seed=turn))
    return run.generate(tiny.ids(1, 2, seed=50 + turn), max_new_tokens=4, **SAMPLED).new_ids[0].tolist()


def alone(model, seed: int, turns: int) -> list[list[int]]:
    """What a session says that never leaves the device."""
    run = SessionRuntime(model, None, ROOMY, 0)
    run.new("alone", seed=seed)
    return [chat(run, turn) for turn in range(turns)]


@pytest.mark.parametrize("host_budget", [ROOMY, 0], ids=["host", "disk"])
def test_sessions_that_take_turns_say_what_they_say_alone(store, model, host_budget) -> None:
    run = SessionRuntime(model, store, ROOMY, host_budget)
    for seed in range(3):
        run.new(f"s{seed}", seed=seed)
    torch.manual_seed(1)
    ambient = torch.get_rng_state()
    said: dict[int, list[list[int]]] = {0: [], 1: [], 2: []}
    for turn in range(3):
        for seed in said:
            run.switch(f"s{seed}")
            said[seed].append(chat(run, turn))
    assert said == {seed: alone(model, seed, 3) for seed in said}
    assert len({str(lines) for lines in said.values()}) == 3
    assert torch.equal(torch.get_rng_state(), ambient)  # the process's own generator is not drawn from


def test_a_fork_samples_what_its_parent_would_have(store, model) -> None:
    run = SessionRuntime(model, store, ROOMY, ROOMY)
    run.new("parent", seed=4)
    chat(run, 0)
    run.fork(None, "child")
    run.fork(None, "other")
    lines = {"parent": chat(run, 1)}
    for id in ("child", "other"):
        run.switch(id)
        if id == "other":
            run.generate(max_new_tokens=1, seed=9, **SAMPLED)
        lines[id] = chat(run, 1)
    assert lines["parent"] == lines["child"] == alone(model, 4, 2)[1]
    assert lines["other"] != lines["child"]


def live_bytes(before: set[int]) -> int:
    """Bytes behind all tensors of the process that were not there before."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for pointer, nbytes in storages.items() if pointer not in before)


@pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning")  # of torch, when it is looked at
def test_what_is_accounted_for_is_what_the_process_holds(store, model) -> None:
    run = SessionRuntime(model, store, ROOMY, 60_000)
    run.new("warm")
    run.step(tiny.ids(1, 5))
    run.delete("warm")
    gc.collect()
    before = {t.untyped_storage().data_ptr() for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    for i in range(4):
        run.new(f"s{i}")
        run.step(tiny.ids(1, 40 + i), last_logits_only=False)
        chat(run, 0)
        usage = run.usage()
        generators = 5056 * (len(usage.on_host) + 1)  # which torch holds outside tensors
        assert live_bytes(before) + generators == usage.device + usage.host
        assert usage.host <= 60_000
    assert usage.on_disk


@pytest.mark.parametrize("rows", [1, 3])
def test_sizes_are_known_beforehand(model, rows) -> None:
    run = SessionRuntime(model, None, ROOMY, ROOMY)
    run.new("a")
    for given, options in ((7, {}), (1, {}), (2, {"max_new_tokens": 5}), (3, {"max_new_tokens": 1}), (4, {})):
        ids = tiny.ids(rows, given)
        expected = run.active.after(ids, **options)
        verb = run.generate if options else run.step
        verb(ids, **options, **({"eos_token_id": None} if options else {}))
        assert run.active.nbytes() <= expected <= run.active.nbytes() + 8 * rows * 2


def test_a_generation_that_would_not_fit_is_refused_beforehand(model) -> None:
    run = SessionRuntime(model, None, 30_000, 0)
    run.new("a")
    run.step(tiny.ids(1, 9))
    with pytest.raises(BudgetError, match="on the device"):
        run.generate(max_new_tokens=100, given=tiny.ids(1, 1))
    assert run.active.seen_tokens == 9


def test_a_generation_that_fails_leaves_the_session_as_it_was(store, model) -> None:
    run = SessionRuntime(model, store, ROOMY, ROOMY)
    run.new("a", seed=3)
    first = chat(run, 0)

    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > run_length + 1:
            raise RuntimeError("a processor fails")
        return scores

    run_length = run.active.seen_tokens + 1
    with pytest.raises(RuntimeError, match="a processor fails"):
        run.generate(tiny.ids(1, 1), max_new_tokens=5, logits_processor=[broken], **SAMPLED)
    assert [first, chat(run, 1)] == alone(model, 3, 2)


def test_a_forward_pass_that_fails_breaks_the_session_and_it_goes_back(store, model, monkeypatch) -> None:
    run = SessionRuntime(model, store, ROOMY, ROOMY)
    run.new("a", seed=3)
    first = chat(run, 0)
    run.checkpoint()
    layer = model.model.layers[-1]
    with monkeypatch.context() as patch:
        patch.setattr(layer.mlp, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.step(tiny.ids(1, 3))
    with pytest.raises(StoreError, match="half written"):
        run.step(tiny.ids(1, 3))
    run.revert("a")
    assert [first, chat(run, 1)] == alone(model, 3, 2)


def test_a_handoff_in_the_middle_equals_the_direct_one(store) -> None:
    pair = tiny_pair.pair()
    bridge = Bridge.direct(pair.source_identity, pair.receiver_identity)
    ids, more = tiny_pair.ids_of(), tiny_pair.ids_of(" and more")
    source = continue_from(pair.source, prefill(pair.source, ids).state(), more)
    direct = generate_from(pair.receiver, bridge(source.state()), more, max_new_tokens=8, do_sample=False)

    run = SessionRuntime(pair.source, store, ROOMY, ROOMY)
    run.new("chat")
    run.step(ids)
    run.fork("chat", "stays")
    run.step(more)
    run.handoff(pair.receiver, bridge=bridge)
    made = run.generate(more, max_new_tokens=8, do_sample=False)
    assert made.new_ids.tolist() == direct.new_ids.tolist()
    assert made.prefix_tokens_processed == 0
    assert [c.label.partition(" | ")[2] for c in run.lineage()] == ["handed over to Qwen3_5ForCausalLM", ""]

    with pytest.raises(StateMismatch, match="does not translate states of this model"):
        run.handoff(pair.source, bridge=Bridge.direct(pair.source_identity, pair.source_identity))
    with pytest.raises(StateMismatch, match="leads to another receiver"):
        run.handoff(pair.source, bridge=bridge)
    run.step(more)
    on_receiver = run.close()
    run.switch("stays")  # on the source, as before
    expected = prefill(pair.source, ids)
    expected = continue_from(pair.source, expected, more, last_logits_only=True)
    assert torch.equal(run.step(more), expected.logits)
    run.close()

    with pytest.raises(StateMismatch, match="a model that the runtime does not have"):
        SessionRuntime(pair.source, store, ROOMY, ROOMY).open("chat")
    both = SessionRuntime(LanguageEngine(pair.source, pair.receiver), store, ROOMY, ROOMY)
    both.open("chat", on_receiver)
    assert not identity_of(pair.receiver).differences(both.active.state().bookkeeping.model)
    back = Bridge.direct(pair.receiver_identity, pair.source_identity)
    both.handoff(pair.source, bridge=back)
    assert not identity_of(pair.source).differences(both.active.state().bookkeeping.model)
    both.step(more)


def test_a_handoff_that_does_not_fit_leaves_the_session_on_the_source(store) -> None:
    pair = tiny_pair.pair()
    bridge = Bridge.direct(pair.source_identity, pair.receiver_identity)
    ids = tiny_pair.ids_of()
    run = SessionRuntime(pair.source, store, ROOMY, ROOMY)
    run.new("chat")
    run.step(ids)
    run._tiers.device_budget = run.active.nbytes() - 1
    with pytest.raises(BudgetError, match="on the device"):
        run.handoff(pair.receiver, bridge=bridge)
    run._tiers.device_budget = ROOMY
    expected = continue_from(pair.source, prefill(pair.source, ids), ids, last_logits_only=True)
    assert torch.equal(run.step(ids), expected.logits)


def test_a_handoff_whose_checkpoint_fails_leaves_the_session_on_the_source(quick_path) -> None:
    """Wherever the disk fails: before the session has moved, or when it stands on the receiver."""
    pair = tiny_pair.pair()
    bridge = Bridge.direct(pair.source_identity, pair.receiver_identity)
    ids = tiny_pair.ids_of(" and more")
    expected = continue_from(pair.source, prefill(pair.source, ids), ids, last_logits_only=True).logits
    failed = []
    for n in itertools.count(1):
        left = [0]
        files = functools.partial(Failing, left=left)
        run = SessionRuntime(pair.source, SessionStore(quick_path / str(n), files=files), ROOMY, ROOMY)
        run.new("chat")
        run.step(ids)
        left[0] = n
        try:
            run.handoff(pair.receiver, bridge=bridge)
        except StoreError:
            failed.append(len(run.lineage()))
        else:
            break
        left[0] = 0
        assert run.usage().active == "chat"
        assert torch.equal(run.step(ids), expected)
    assert set(failed) == {0, 1}  # before the first checkpoint, and before the second


def test_steps_give_logits_of_the_last_token_or_of_all(model) -> None:
    run = SessionRuntime(model, None, ROOMY, ROOMY)
    run.new("a")
    ids = tiny.ids(2, 9)
    assert run.step(ids[:, :5]).shape == (2, 1, tiny.VOCAB)
    every = run.step(ids[:, 5:], last_logits_only=False)
    assert every.shape == (2, 4, tiny.VOCAB)
    whole = model(ids).logits[:, 5:]
    # another schedule of passes: equal within float32 rounding
    torch.testing.assert_close(log_softmax(every, -1), log_softmax(whole, -1), rtol=0, atol=1e-4)


def test_a_session_that_has_read_nothing_keeps_its_seed_and_its_tokens(store, model) -> None:
    run = SessionRuntime(model, store, ROOMY, ROOMY)
    ids = tiny.ids(1, 3)
    run.new("a", seed=5, pending=ids)
    run.fork("a", "child")
    run.evict("a")
    lines = {}
    for id in ("a", "child"):
        run.switch(id)
        lines[id] = run.generate(max_new_tokens=5, **SAMPLED).new_ids.tolist()
    run.new("plain", seed=5)
    assert lines["a"] == lines["child"] == run.generate(ids, max_new_tokens=5, **SAMPLED).new_ids.tolist()


def test_misuse_of_a_chat_is_refused(model) -> None:
    run = SessionRuntime(model, None, ROOMY, ROOMY)
    run.new("a")
    cases = [
        (lambda: run.step(), "Give the session tokens"),
        (lambda: run.step(torch.zeros(3)), "must be integers"),
        (lambda: run.step(torch.zeros(3, dtype=torch.int64)), "Give the session tokens"),
        (lambda: run.generate(tiny.ids(1, 1), max_new_tokens=2), "needs two tokens"),
        (lambda: run.generate(tiny.ids(1, 3), max_new_tokens=2, num_beams=2), "fork it instead"),
    ]
    for attempt, message in cases:
        with pytest.raises((CaptureError, StoreError), match=message):
            attempt()
    run.step(tiny.ids(2, 3))
    with pytest.raises(CaptureError, match=r"must be \[2, N\]"):
        run.step(tiny.ids(1, 3))
