"""Runtimes that return pass; each way of not returning, and each impostor that gets through, fails by name."""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from statebridge.bridge import Bridge
from statebridge.capture import continue_from, generate_from, identity_of, prefill
from statebridge.errors import FingerprintError
from statebridge.sessions import Buffer, BufferKind, HybridSession
from statebridge.sessions.conformance import (
    EXCURSIONS,
    Altered,
    AnotherProcess,
    Drifted,
    Foreign,
    Stale,
    WrongRandom,
    assert_conforms,
    conform,
)
from statebridge.sessions.fingerprint import max_difference

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.fingerprint import planted
from experiments.fingerprint.planted import Planted

HERE = tuple(excursion for excursion in EXCURSIONS if not isinstance(excursion, AnotherProcess))
WAYS = {"other": planted.other, "earlier": planted.earlier, "wander": planted.wander}


def put_through(factory=Planted, *, excursions=HERE, probe=planted.probe, eps=0.0, **options):
    return conform(
        factory, planted.anchor, probe, max_difference, eps, excursions=excursions, **(WAYS | options)
    )


def failed(verdict) -> set[str]:
    return {case.name for case in verdict.cases if not case.passed}


@pytest.mark.slow
def test_a_sound_runtime_conforms_bit_exactly() -> None:
    """Also in another process; the distance asked for is 0."""
    verdict = assert_conforms(Planted, planted.anchor, planted.probe, max_difference, **WAYS)
    assert len(verdict.cases) == 10
    assert [case.distance for case in verdict.cases if not case.impostor] == [0.0] * 6
    assert "FAIL" not in verdict.markdown()


def test_a_runtime_that_keeps_leftovers_fails() -> None:
    """What it wandered through is still there after it has come back into the same object."""

    class Leftovers(Planted):
        since = 0.0

        def step(self, times: int = 1) -> np.ndarray:
            out = super().step(times) + self.since
            self.since += 1.0
            return out

        def load(self, buffers: Iterable[Buffer]) -> None:
            super().load(buffers)
            self.since = max(self.since, 1.0)  # right in a new runtime, which has made one pass

    assert failed(put_through(Leftovers)) == {"other text", "other sessions in turns"}


def test_a_runtime_that_forgets_fails_everywhere() -> None:
    class Forgets(Planted):
        def load(self, buffers: Iterable[Buffer]) -> None:
            super().load(buffers)
            self.clock = 0

    assert failed(put_through(Forgets)) == {excursion.name for excursion in HERE}


def test_a_runtime_that_leans_on_the_process_fails() -> None:
    class Leans(Planted):
        def load(self, buffers: Iterable[Buffer]) -> None:
            super().load(buffers)
            self.totals = self.totals + (np.random.get_state()[1][0] == 97)  # the seed that disturbs

    assert failed(put_through(Leans)) == {"disturbed process"}


def test_a_fork_that_shares_memory_fails() -> None:
    """What the fork adds in place is added to the buffer that it was loaded from."""

    class Shares(Planted):
        def load(self, buffers: Iterable[Buffer]) -> None:
            buffers = list(buffers)
            super().load(buffers)
            self.totals = next(buffer.array() for buffer in buffers if buffer.name == "totals")

    assert failed(put_through(Shares)) == {"fork goes elsewhere"}


def test_a_return_that_raises_fails_and_says_so() -> None:
    class Refuses(Planted):
        def load(self, buffers: Iterable[Buffer]) -> None:
            raise OSError("no room")

    verdict = put_through(Refuses)
    assert failed(verdict) == {
        excursion.name for excursion in HERE
    }  # impostors are refused as well: told apart
    assert "OSError: no room" in verdict.markdown()
    assert json.loads(json.dumps(verdict.to_json(), allow_nan=False))["cases"][0]["distance"] == "inf"


def blind(runtime: Planted) -> np.ndarray:
    """An outcome that says nothing."""
    runtime.step(1)
    return np.zeros(1)


def by_memory(runtime: Planted) -> np.ndarray:
    """An outcome that is true to the session and never draws."""
    return runtime.totals


@pytest.mark.parametrize(
    ("probe", "eps", "names"),
    [
        (blind, 0.0, {"another session's state", "a stale state", "a wrong random state", "a drifted state"}),
        (by_memory, 0.0, {"a wrong random state"}),
        (planted.probe, 0.5, {"a drifted state"}),  # an eps that forgives what must not be
    ],
)
def test_impostors_that_get_through_are_named(probe, eps, names) -> None:
    given = (Planted, planted.anchor, probe, max_difference, eps)
    verdict = conform(*given, excursions=(), impostors=_all(), **WAYS)
    assert names <= failed(verdict)
    with pytest.raises(AssertionError, match="does not conform") as caught:
        assert_conforms(*given, excursions=(), impostors=_all(), **WAYS)
    assert all(f"| {name} |" in str(caught.value) for name in names)


def _all():
    return (Foreign(), Stale(), WrongRandom(), Drifted())


def test_each_impostor_is_what_it_says() -> None:
    """Against the buffers themselves, so that an impostor that is secretly the session cannot hide."""
    from statebridge.sessions.conformance import Setting

    setting = Setting(
        Planted, planted.anchor, planted.other, planted.earlier, planted.wander, planted.probe, None
    )
    right = {buffer.name: buffer.data.tobytes() for buffer in setting.saved(planted.anchor)}

    def changed(impostor) -> set[str]:
        return {b.name for b in impostor(setting) if b.data.tobytes() != right[b.name]}

    assert changed(WrongRandom()) == {"random"}
    assert changed(Drifted()) == {"notes", "totals", "recent", "left", "right", "scratch"}
    assert changed(Drifted(scale=0.0)) == set()
    assert {"notes", "clock", "random"} <= changed(Stale())
    assert {"left", "right"} & changed(Stale()) == set()
    assert {"left", "notes", "random"} <= changed(Foreign())
    assert "clock" not in changed(Foreign())


def test_an_impostor_that_cannot_be_made_is_no_rejection() -> None:
    def broken(buffers):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        put_through(impostors=(Altered("broken", broken),))

    class Still(Planted):
        def buffers(self) -> Iterable[Buffer]:
            return (b for b in super().buffers() if b.spec.kind is not BufferKind.RANDOM)

    with pytest.raises(FingerprintError, match="no random state"):
        put_through(Still, excursions=())


def test_a_local_function_cannot_go_to_another_process() -> None:
    with pytest.raises(FingerprintError, match="functions of a module"):
        put_through(lambda: Planted(), excursions=(AnotherProcess(),))


def stuck(runtime: Planted) -> np.ndarray:
    """Never comes back, in another process."""
    if multiprocessing.parent_process() is not None:
        time.sleep(600)
    return planted.probe(runtime)


def test_a_process_that_is_stuck_fails_and_is_ended() -> None:
    verdict = put_through(probe=stuck, excursions=(AnotherProcess(timeout=1.0),))
    assert failed(verdict) == {"another process"}
    assert "TimeoutError" in verdict.cases[0].error
    assert multiprocessing.active_children() == []


def test_a_runtime_that_does_not_repeat_itself_is_refused() -> None:
    noise = np.random.default_rng()
    with pytest.raises(FingerprintError, match="does not repeat itself"):
        put_through(probe=lambda runtime: runtime.step(1) + noise.random())


class Chat:
    """A model with a `HybridSession`: reads, samples, leaves and returns."""

    def __init__(self, model) -> None:
        self.model = model
        self.session = HybridSession(generators={})

    def read(self, ids: torch.Tensor) -> None:
        state = self.session.state
        live = prefill(self.model, ids) if state is None else continue_from(self.model, state, ids)
        self.session.state = live.state()

    def probe(self) -> np.ndarray:
        """Logits of three tokens, then eight sampled ones from the process's generator, [N]."""
        nxt = tiny.ids(1, 3, seed=9)
        logits = continue_from(self.model, self.session.state, nxt).logits
        drawn = generate_from(
            self.model, self.session.state, nxt, max_new_tokens=8, do_sample=True, temperature=3.0, top_k=0
        )
        return np.concatenate((logits.flatten().numpy(), drawn.new_ids.flatten().numpy()))

    def buffers(self) -> Iterable[Buffer]:
        return self.session.buffers()

    def load(self, buffers: Iterable[Buffer]) -> None:
        self.session.load(buffers)


def begin(chat: Chat, seed: int, length: int = 20) -> None:
    torch.manual_seed(seed)
    chat.read(tiny.ids(1, 20, seed)[:, :length])
    torch.rand(length)


def wander(chat: Chat) -> None:
    chat.read(tiny.ids(1, 7, seed=5))
    torch.rand(3)


def wrong_bridge(model, receiver, buffers):
    """What a copy of another model's state (here: same shapes, other weights) brings into this session."""
    session = HybridSession()
    strange = prefill(receiver, tiny.ids(1, 20, 1)).state()
    session.state = Bridge.direct(identity_of(receiver), identity_of(model))(strange)
    named = {buffer.name: buffer for buffer in session.buffers() if buffer.name.startswith("layers.")}
    return [named.get(buffer.name, buffer) for buffer in buffers]


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2"])
def test_hybrid_sessions_conform_bit_exactly(family, tmp_path) -> None:
    model, receiver = tiny.build(family), tiny.build(family, seed=1)
    threads = torch.get_num_threads()
    try:
        verdict = assert_conforms(
            lambda: Chat(model),
            functools.partial(begin, seed=1),
            Chat.probe,
            max_difference,
            other=functools.partial(begin, seed=2),
            earlier=functools.partial(begin, seed=1, length=16),
            wander=wander,
            path=tmp_path / "store",
            excursions=HERE,
            impostors=(
                *_all(),
                Drifted(scale=1e-3, name="a slightly drifted state"),
                Altered("a wrong bridge", functools.partial(wrong_bridge, model, receiver)),
            ),
        )
    finally:
        torch.set_num_threads(threads)
    assert all(case.distance == 0 for case in verdict.cases if not case.impostor)
