"""Sessions of worlds: they come back bit for bit, in another process too, and each keeps its own kind of state."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_world import F, frames, tiny_model

from statebridge.errors import ConfigError, StateMismatch, StoreError
from statebridge.sessions import SessionRuntime, SessionStore
from statebridge.sessions.conformance import EXCURSIONS, AnotherProcess, assert_conforms
from statebridge.sessions.fingerprint import max_difference
from statebridge.worlds import Sampler, WorldModel
from statebridge.worlds.motion import BACK, FORWARD, LEFT, RIGHT, STAY, integrated, moves_of
from statebridge.worlds.rollout import reread
from statebridge.worlds.runtimes import (
    BankSession,
    MarkovSession,
    WindowedSession,
    WorldEngine,
    WorldSession,
    stored,
)
from statebridge.worlds.runtimes.markov import conditioning_of

MODEL = tiny_model()
MAKE: dict[str, Callable[[WorldModel], WorldSession]] = {
    "markov": lambda model: MarkovSession(model, seed=3),
    "bank": lambda model: BankSession(model, seed=3, retrieve=2),
    "windowed": lambda model: WindowedSession(model, seed=3, window=2, sink=1),
}
PATH = [[LEFT, LEFT], [FORWARD, LEFT], [RIGHT, FORWARD], [STAY, BACK], [RIGHT, RIGHT], [FORWARD, FORWARD]]


def walked(kind: str, chunks: int, model: WorldModel = MODEL) -> WorldSession:
    """A session that saw one chunk and made others."""
    session = MAKE[kind](model)
    session.observe(frames(1, 1)[0], [STAY, FORWARD])
    for actions in PATH[: chunks - 1]:
        session.step(actions)
    return session


def onward(session: WorldSession, chunks: int = 2) -> torch.Tensor:
    """The next frames."""
    return torch.cat([session.step(actions) for actions in PATH[-chunks:]])


_CHILD = """
import os, signal, sys
import numpy as np, torch
sys.path[:0] = sys.argv[3:]
torch.set_num_threads(1)
from pathlib import Path
from test_runtimes import MAKE, onward, walked
from statebridge.sessions import SessionRuntime, SessionStore
from statebridge.sessions.conformance import EXCURSIONS, AnotherProcess, assert_conforms
from statebridge.sessions.fingerprint import max_difference
from tiny_world import tiny_model
store, folder = SessionStore(Path(sys.argv[2]) / "store"), Path(sys.argv[2])
if sys.argv[1] == "leave":
    for kind in MAKE:
        (folder / kind).write_text(store.checkpoint(walked(kind, 4)))
    os.kill(os.getpid(), signal.SIGKILL)
torch.manual_seed(99), torch.rand(7)
found = {}
for kind in MAKE:
    for without in ("nothing", "random"):
        session = MAKE[kind](tiny_model())
        session.generator.manual_seed(4)
        buffers = store.restore((folder / kind).read_text())
        session.load(b for b in buffers if b.name != without)
        found[f"{kind}.{without}"] = onward(session).numpy()
np.savez(folder / "found.npz", **found)
"""


def test_killed_and_restored_elsewhere_goes_on_bit_for_bit(tmp_path: Path) -> None:
    here = Path(__file__).parent
    paths = [str(here), str(here.parent)]
    leave, back = (
        subprocess.run([sys.executable, "-c", _CHILD, verb, str(tmp_path), *paths], check=False)
        for verb in ("leave", "return")
    )
    assert leave.returncode == -signal.SIGKILL
    assert back.returncode == 0
    found = np.load(tmp_path / "found.npz")
    for kind in MAKE:
        never_left = onward(walked(kind, 4)).numpy()
        assert np.array_equal(found[f"{kind}.nothing"], never_left), kind  # bit-exact
        assert not np.array_equal(found[f"{kind}.random"], never_left), kind


@pytest.mark.parametrize("kind", MAKE)
def test_every_other_buffer_is_load_bearing(kind: str) -> None:
    session = walked(kind, 4)
    buffers = {b.name: b for b in session.buffers()}
    never_left = onward(session)
    for name in ("pose", "clock.time"):
        other = MAKE[kind](MODEL)
        other.load(b for b in buffers.values() if b.name != name)
        assert not torch.equal(onward(other), never_left), name


@pytest.mark.parametrize(("kind", "sizes"), [("markov", "flat"), ("bank", "grows"), ("windowed", "stays")])
def test_sizes_follow_the_class_and_are_foretold(kind: str, sizes: str) -> None:
    session, held = walked(kind, 1), []
    for actions in PATH[:5]:
        foretold = session.after(actions)
        session.step(actions)
        held.append(session.nbytes())
        assert foretold == held[-1]
    steps = np.diff(held)
    if sizes == "flat":
        assert (steps == 0).all()
    elif sizes == "grows":
        assert len(set(steps)) == 1
        assert steps[0] > 0
    else:
        assert steps[0] > 0
        assert (steps[1:] == 0).all()


def test_keys_are_derived_until_a_chunk_has_left_the_window() -> None:
    session = walked("windowed", 3)  # sink and two in the window: all that ever was
    assert not session.rolled  # type: ignore[attr-defined]
    slim = stored(session.buffers())
    assert not any(b.name.startswith("layers.") for b in slim)
    back = MAKE["windowed"](MODEL)
    back.load(slim)
    for name, tensor in session.tensors.items():
        assert torch.equal(back.tensors[name], tensor), (
            name
        )  # bit-exact: the same passes over the same frames
    assert torch.equal(onward(back), onward(session))


def test_keys_of_a_rolled_window_are_state() -> None:
    session = walked("windowed", 5)
    buffers = list(session.buffers())
    assert not any(b.spec.derivable_from for b in buffers)
    back = MAKE["windowed"](MODEL)
    with pytest.raises(StoreError, match="left the window"):
        back.load(b for b in buffers if not b.name.startswith("layers."))
    # the refusal is right: reading the kept frames again gives other keys
    before = session._history(session._conditioning([STAY] * F, None))
    numbers = session.tensors["window.chunks"].tolist()
    again = reread(
        MODEL,
        session.tensors["window.frames"][None],
        conditioning_of(session.tensors, "window", MODEL.device),
        numbers,
    )
    assert numbers == [0, 3, 4]
    assert torch.equal(again.groups[0].coordinates, before.groups[0].coordinates)
    assert not torch.allclose(again.groups[0].keys[-1], before.groups[0].keys[-1], atol=1e-3)


@pytest.mark.parametrize("kind", MAKE)
def test_forks_share_nothing(kind: str, tmp_path: Path) -> None:
    session, store = walked(kind, 3), SessionStore(tmp_path)
    saved = store.checkpoint(session)
    one, two = MAKE[kind](MODEL), MAKE[kind](MODEL)
    one.load(store.restore(saved))
    two.load(store.restore(store.fork(saved)))
    one.step([LEFT, LEFT])
    one.step([FORWARD, FORWARD])
    assert torch.equal(onward(two), onward(session))


def test_what_does_not_belong_is_refused_and_changes_nothing() -> None:
    session = walked("windowed", 3)
    buffers = list(session.buffers())
    other = walked("windowed", 2, tiny_model(1))
    before = {name: tensor.clone() for name, tensor in other.tensors.items()}
    with pytest.raises(StateMismatch, match="model"):
        other.load(buffers)
    with pytest.raises(StateMismatch, match="runtime"):
        walked("markov", 1).load(b for b in buffers if b.name == "settings")
    with pytest.raises(StoreError, match="layers"):
        WindowedSession(MODEL, window=2, sink=1).load(
            b for b in buffers if not b.name.startswith(("window.", "layers.0"))
        )
    with pytest.raises(StoreError, match=r"bank\.poses"):
        walked("markov", 1).load(b for b in walked("bank", 2).buffers() if b.name == "bank.poses")
    with pytest.raises(ConfigError, match="actions"):
        session.step([STAY])
    with pytest.raises(ConfigError, match="actions"):
        session.step([STAY, 7])
    assert all(torch.equal(other.tensors[name], tensor) for name, tensor in before.items())


def test_the_bank_finds_the_chunk_that_looked_the_same_way() -> None:
    session = BankSession(MODEL, Sampler(), retrieve=2)
    session.observe(frames(1, 1)[0], [STAY, STAY])
    for actions in [[LEFT] * F] * 4 + [[RIGHT] * F] * 4:
        session.step(actions)
    conditioning = session._conditioning([STAY] * F, None)
    assert conditioning.poses[0, -1, 2].abs() < 1e-6
    found = session.retrieved(conditioning)
    assert found == [0, 8]  # the first chunk looked this way; the latest one is always read


def test_true_moves_replace_dead_reckoning() -> None:
    session, blocked = walked("markov", 1), walked("markov", 1)
    start = session.pose.clone()
    session.step([FORWARD, FORWARD])
    blocked.step([FORWARD, FORWARD], moves=torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(blocked.pose, start)
    assert session.pose[0] - start[0] == pytest.approx(0.8)
    poses = torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(integrated(poses[0], moves_of(poses)), poses[1:])  # float64 rounding


def test_worlds_take_turns_on_one_device(tmp_path: Path) -> None:
    """Memory for one session and a half: all the others go to the disk and come back, bit for bit."""
    size = walked("bank", 5).nbytes()
    engine = WorldEngine(MODEL, BankSession, retrieve=2)
    run = SessionRuntime(engine, SessionStore(tmp_path), device_budget=size, host_budget=size // 2)
    alone = {}
    for seed in range(3):
        begin = {"seed": seed, "frames": frames(1, 1, seed)[0], "actions": [STAY, STAY]}
        run.new(f"world {seed}", **begin)
        alone[seed] = engine.fresh(**begin)
    for actions in PATH[:4]:
        for seed in range(3):
            run.switch(f"world {seed}")
            assert torch.equal(run.step(actions), alone[seed].step(actions))
    assert len(run.usage().on_disk) >= 1


@pytest.mark.parametrize("kind", MAKE)
def test_returns_are_told_from_impostors(kind: str) -> None:
    assert_conforms(
        lambda: MAKE[kind](MODEL),
        lambda session: session.load(walked(kind, 4).buffers()),
        lambda session: onward(session, 1).numpy(),
        max_difference,
        other=lambda session: _elsewhere(session),
        earlier=lambda session: session.load(walked(kind, 2).buffers()),
        wander=lambda session: session.step([FORWARD, LEFT]),
        excursions=[e for e in EXCURSIONS if not isinstance(e, AnotherProcess)],  # has a test of its own
    )


def _elsewhere(session: WorldSession) -> None:
    session.generator.manual_seed(8)
    session.observe(frames(1, 1, seed=9)[0], [FORWARD, LEFT])
    for actions in PATH[2:5]:
        session.step(actions)
