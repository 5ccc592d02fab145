"""Worlds against callers who write into what they gave or got, and against buffers that do not fit. Bit-exact."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from test_runtimes import MAKE, MODEL, PATH, onward, walked
from tiny_world import frames

from statebridge.errors import ConfigError, StateMismatch, StoreError
from statebridge.sessions import SessionRuntime, SessionStore
from statebridge.sessions.adapters import tensor_buffer
from statebridge.worlds import Sampler
from statebridge.worlds.motion import FORWARD, LEFT, STAY
from statebridge.worlds.runtimes import MarkovSession, WindowedSession, WorldEngine, WorldSession


def held(session: WorldSession) -> dict[str, bytes]:
    return {b.name: b.data.tobytes() for b in session.buffers()}


@pytest.mark.parametrize("kind", MAKE)
def test_a_session_owns_what_it_remembers(kind: str) -> None:
    """Frames that were shown, and frames that were given back, may be written into by whoever has them."""
    seen = frames(1, 1)[0]
    session = MAKE[kind](MODEL)
    session.observe(seen, [STAY, FORWARD])
    before = held(session)
    seen.zero_()
    assert held(session) == before
    made = session.step(PATH[0])
    before = held(session)
    made.add_(1).div_(2)  # as one does to show them
    assert held(session) == before


@pytest.mark.parametrize("kind", MAKE)
def test_memory_is_that_of_the_session_and_not_of_a_video_it_saw(kind: str) -> None:
    session = MAKE[kind](MODEL)
    session.observe(frames(1, 5)[0], [STAY, FORWARD] * 5)
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in session.tensors.values()
    }
    assert sum(storages.values()) + 24 + 5056 == session.nbytes()  # with the pose and the generator


@pytest.mark.parametrize("kind", MAKE)
def test_frames_that_are_none_change_nothing(kind: str) -> None:
    session = walked(kind, 2)
    before = held(session)
    good = frames(1, 2)[0]
    late = good.clone()
    late[-1, 0, 0, 0] = torch.nan
    for bad in (good[:, :1], good[..., :8], (good * 127 + 128).to(torch.uint8), good.double(), late):
        with pytest.raises(ConfigError, match="frames"):
            session.observe(bad, [STAY] * 4)
        assert held(session) == before
    with pytest.raises(ConfigError, match="actions"):
        session.observe(good, [STAY, STAY, STAY, 9])
    assert held(session) == before


def test_an_observation_that_fails_half_way_is_not_stored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = SessionRuntime(WorldEngine(MODEL, WindowedSession), SessionStore(tmp_path), 10**8, 10**8)
    run.new("w", frames=frames(1, 1)[0], actions=[STAY, STAY])
    session = run.active
    assert isinstance(session, WorldSession)
    remember = session._remember
    calls = []

    def once(*args: object) -> dict[str, torch.Tensor]:
        calls.append(1)
        return remember(*args) if len(calls) < 2 else 1 / 0  # type: ignore[arg-type, return-value]

    monkeypatch.setattr(session, "_remember", once)
    with pytest.raises(ZeroDivisionError):
        session.observe(frames(1, 2)[0], [STAY] * 4)
    with pytest.raises(StoreError, match="half written"):
        run.checkpoint()


@pytest.mark.parametrize("moves", [torch.zeros(1, 3), torch.zeros(2, 2), torch.full((2, 3), torch.nan)])
def test_moves_that_are_none_change_nothing(moves: torch.Tensor) -> None:
    session = walked("bank", 2)
    before = held(session)
    for attempt in (session.step, session.after):
        with pytest.raises(ConfigError, match="moves"):
            attempt([LEFT, LEFT], moves=moves)
    assert held(session) == before


@pytest.mark.parametrize("kind", MAKE)
def test_buffers_of_another_form_are_refused_and_change_nothing(kind: str) -> None:
    buffers = {b.name: b for b in walked(kind, 4).buffers()}
    session = walked(kind, 2)
    before = held(session)
    for name in session.tensors:
        tensor = torch.from_numpy(buffers[name].array().copy())
        axis = 2 if name.startswith("layers") else 0
        for bad in (tensor.narrow(axis, 0, 1), tensor[None], tensor.to(torch.float16)):
            changed = tensor_buffer(name, buffers[name].spec.kind, bad)
            with pytest.raises(StoreError, match=name.split(".")[0]):
                session.load((buffers | {name: changed}).values())
    for name, bad in (("pose", torch.zeros(2, dtype=torch.float64)), ("clock.chunk", torch.tensor(-1))):
        with pytest.raises(StoreError, match=name):
            session.load((buffers | {name: tensor_buffer(name, buffers[name].spec.kind, bad)}).values())
    assert held(session) == before


@pytest.mark.parametrize("kind", MAKE)
def test_a_world_forked_on_the_device_then_evicted_goes_on_in_a_second_runtime(
    kind: str, tmp_path: Path
) -> None:
    options = {"markov": {}, "bank": {"retrieve": 2}, "windowed": {"window": 2, "sink": 1}}[kind]
    begin = {"seed": 3, "frames": frames(1, 1)[0], "actions": [STAY, FORWARD]}
    engine, store = WorldEngine(MODEL, type(walked(kind, 1)), **options), SessionStore(tmp_path)
    run = SessionRuntime(engine, store, 10**8, 0)
    run.new("w", **begin)
    for actions in PATH[:3]:
        run.step(actions)
    run.fork("w", "child", switch=True)
    run.step([LEFT, LEFT])  # the parent must not feel it
    run.switch("w")
    run.evict("w")
    again = SessionRuntime(engine, store, 10**8, 0)
    again.open("w")
    never_left = walked(kind, 4)
    assert torch.equal(torch.cat([again.step(a) for a in PATH[-2:]]), onward(never_left))


def test_a_session_goes_on_with_the_sampler_that_it_had() -> None:
    session = walked("markov", 2)
    other = MarkovSession(MODEL, Sampler(session.sampler.sigmas, stochastic=False))
    with pytest.raises(StateMismatch, match="stochastic"):
        other.load(session.buffers())


def test_buffers_say_the_truth_about_their_growth() -> None:
    """What `grows` promises: entries once written are never changed."""
    session = walked("bank", 2)
    early = {b.name: b for b in session.buffers() if b.spec.grows is not None}
    early = {name: dataclasses.replace(b, data=b.data.copy()) for name, b in early.items()}
    onward(session)
    for buffer in session.buffers():
        if buffer.name in early:
            old = early[buffer.name].array()
            assert (buffer.array()[: len(old)] == old).all()
