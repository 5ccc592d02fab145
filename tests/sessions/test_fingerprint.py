"""Discovery finds what was planted, and says so when nothing can be measured. Equality is bit-exact unless stated."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from statebridge.errors import FingerprintError
from statebridge.sessions import Buffer, BufferKind
from statebridge.sessions.fingerprint import (
    Derivation,
    Fingerprint,
    Growth,
    Mode,
    Role,
    growth_of,
    max_difference,
    mean_divergence,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.fingerprint import planted
from experiments.fingerprint.planted import Planted

LENGTHS = (2, 6, 20)
EPS = 1e-9


def sessions(seed: int) -> dict[int, functools.partial[None]]:
    return {steps: functools.partial(planted.anchor, seed=seed, steps=steps) for steps in LENGTHS}


def discover(factory=Planted, probe=planted.probe, **options) -> Fingerprint:
    options = {"other": sessions(2)} | options
    return Fingerprint.discover(factory, sessions(1), probe, max_difference, EPS, **options)


@pytest.fixture(scope="module")
def found() -> Fingerprint:
    return discover()


def test_the_planted_state_is_found(found) -> None:
    assert set(found.needed) == planted.NEEDED
    roles = {finding.name: finding.role for finding in found.findings}
    assert roles["totals"] is Role.DERIVABLE
    assert roles["scratch"] is Role.SHAPE
    assert roles["left"] is roles["settings"] is Role.SPARED
    assert found.enough.worst == found.noise.worst == found.restored.worst == 0


def test_a_redundant_pair_goes_through_greedy(found) -> None:
    """Alone, either can go; the largest-first descent keeps exactly one, and names the other."""
    assert found.greedy
    for name, peer in (("left", "right"), ("right", "left")):
        assert found[name].trials[Mode.FRESH].worst == 0
        assert peer in found[name].reason
    assert found["right"].without > EPS

    class Single(Planted):
        def buffers(self) -> Iterable[Buffer]:
            return (buffer for buffer in super().buffers() if buffer.name != "left")

    alone = discover(Single)
    assert not alone.greedy
    assert set(alone.needed) == planted.NEEDED


def test_the_found_set_is_minimal(found) -> None:
    """Taking any element away breaks the return, whatever stands in; so does its measured `without`."""
    for name in found.needed:
        runtime = Planted()
        planted.anchor(runtime)
        never_left = planted.probe(runtime)
        again, fresh = Planted(), {buffer.name: buffer for buffer in Planted().buffers()}
        planted.anchor(again)
        again.load(
            [fresh.get(b.name, b) if b.name in (name, "left", "right") else b for b in again.buffers()]
        )
        if name == "right":
            again.left = again.right = np.zeros(4)
        assert max_difference(never_left, planted.probe(again)) > EPS
        assert found[name].without > EPS
    assert all(finding.without is None for finding in found.findings if finding.name not in found.needed)


def test_buffers_come_by_size_with_their_class(found) -> None:
    sizes = [finding.largest for finding in found.findings]
    assert sizes == sorted(sizes, reverse=True)
    growth = {finding.name: finding.growth for finding in found.findings}
    assert growth["notes"] is Growth.GROWING
    assert growth["recent"] is Growth.WINDOWED
    assert growth["totals"] is growth["random"] is Growth.FLAT
    assert found.nbytes(20) - found.nbytes(2) == 18 * 32 + 32
    assert found.nbytes(20, Role.DERIVABLE) == 32


@pytest.mark.parametrize(
    ("sizes", "growth"),
    [
        ({1: 8}, Growth.UNKNOWN),
        ({1: 100, 9: 104}, Growth.FLAT),  # a digit more in JSON
        ({9: 80, 1: 8}, Growth.GROWING),
        ({1: 8, 2: 16, 4: 16}, Growth.WINDOWED),
        ({1: 8, 2: 8, 4: 16}, Growth.GROWING),
        ({1: 8, 2: 16, 4: 8}, Growth.IRREGULAR),
        ({1: 0, 2: 0}, Growth.FLAT),
    ],
)
def test_classes(sizes, growth) -> None:
    assert growth_of(sizes) is growth


def test_what_raises_is_infinitely_far(found) -> None:
    trial = found["scratch"].trials[Mode.FRESH]
    assert math.isinf(trial.worst)
    assert "ValueError" in trial.errors[6]
    assert found["scratch"].trials[Mode.ZERO].errors == {}


class Hidden(Planted):
    """Keeps what it counts outside its buffers."""

    hidden = 0

    def step(self, times: int = 1) -> np.ndarray:
        self.hidden += times
        return super().step(times) + self.hidden


def test_state_outside_the_buffers_is_reported() -> None:
    with pytest.raises(FingerprintError, match="keeps state outside its buffers"):
        discover(Hidden)


def test_state_in_the_process_is_reported() -> None:
    """A generator of the process, seeded by the factory, is not in the buffers: the return draws from its start."""

    class Ambient(Planted):
        def __init__(self) -> None:
            super().__init__()
            np.random.seed(3)

        def step(self, times: int = 1) -> np.ndarray:
            return super().step(times) + np.random.rand()

    with pytest.raises(FingerprintError, match="keeps state outside its buffers"):
        discover(Ambient)


def test_a_load_that_raises_says_why() -> None:
    class Broken(Planted):
        def load(self, buffers: Iterable[Buffer]) -> None:
            raise KeyError("pose")

    with pytest.raises(FingerprintError, match="KeyError: 'pose'"):
        discover(Broken)


def test_a_runtime_that_does_not_repeat_itself_is_reported() -> None:
    noise = np.random.default_rng()
    with pytest.raises(FingerprintError, match="does not repeat itself"):
        discover(probe=lambda runtime: runtime.step(2) + noise.random())


def test_saving_must_not_move_the_session() -> None:
    class Drawing(Planted):
        def buffers(self) -> Iterable[Buffer]:
            self.random.random()
            return super().buffers()

    with pytest.raises(FingerprintError, match="apart"):
        discover(Drawing)


def raising(sources):
    raise ArithmeticError("no totals")


def wrong(sources):
    (totals,) = planted.totals_of(sources)
    yield Buffer.of("totals", BufferKind.RECURRENT, totals.array() + 1e-3)


def nothing(sources):
    return ()


@pytest.mark.parametrize(
    ("derive", "reason"),
    [(raising, "ArithmeticError: no totals"), (wrong, "off at 2"), (nothing, "did not give it")],
)
def test_a_declared_derivation_is_not_believed(derive, reason) -> None:
    class Claims(Planted):
        def derivations(self) -> Iterable[Derivation]:
            yield Derivation(("totals",), ("notes",), derive)

    found = discover(Claims)
    assert found["totals"].role is Role.NEEDED
    assert "its declared derivation is" in found["totals"].reason
    assert reason in found["totals"].reason
    assert set(found.needed) == planted.NEEDED | {"totals"}


def test_a_derivation_must_hold_at_every_anchor() -> None:
    """One that forgets old notes is right while the session is short, and the reason says where it stops."""

    class Short(Planted):
        def derivations(self) -> Iterable[Derivation]:
            def derive(sources):
                notes = sources["notes"].array()[-6:]
                return planted.totals_of({"notes": Buffer.of("notes", BufferKind.KV, notes)})

            yield Derivation(("totals",), ("notes",), derive)

    found = discover(Short)
    assert found["totals"].role is Role.NEEDED
    assert "holds at 2, 6 and is" in found["totals"].reason
    assert "off at 20" in found["totals"].reason


def test_derivations_build_on_each_other_and_not_on_themselves() -> None:
    class Chained(Planted):
        def derivations(self) -> Iterable[Derivation]:
            def from_totals(sources):
                yield Buffer.of(
                    "scratch", BufferKind.LATENT, np.zeros(8) + 0 * sources["totals"].array().sum()
                )

            yield Derivation(("scr*",), ("totals",), from_totals)
            yield Derivation(("totals",), ("notes",), planted.totals_of)
            yield Derivation(("recent",), ("recent", "clock"), lambda sources: [sources["recent"]])

    found = discover(Chained, group=lambda spec: "both" if spec.name in ("scratch", "totals") else spec.name)
    assert found["both"].role is Role.DERIVABLE
    assert found["both"].reason == "computed again from both, notes"
    assert found["recent"].role is Role.NEEDED
    assert "No declaration" in found["recent"].trials[Mode.DERIVED].errors[2]
    assert "totals" in discover(Chained, derive=False).needed


def test_groups_are_replaced_as_a_whole(found) -> None:
    pair = discover(group=lambda spec: "pair" if spec.name in ("left", "right") else spec.name)
    assert not pair.greedy
    assert pair["pair"].members == ("left", "right")
    assert pair["pair"].role is Role.NEEDED
    assert pair["pair"].largest == 64
    assert pair["pair"].kinds == ("latent",)


def test_random_states_are_loaded_last() -> None:
    """A load that draws on the way, as initialisers do, returns only when the random state comes after it."""

    class Draws(Planted):
        def load(self, buffers: Iterable[Buffer]) -> None:
            buffers = list(buffers)
            last = next(buffer for buffer in buffers if buffer.name == "random")
            super().load(buffers)
            for buffer in buffers[buffers.index(last) :]:
                if buffer is not last:
                    self.random.random()

    assert set(discover(Draws).needed) == planted.NEEDED


def test_the_result_is_data(found) -> None:
    text = json.dumps(found.to_json(), allow_nan=False)
    read = json.loads(text)
    assert read["needed"] == list(found.needed)
    scratch = next(finding for finding in read["findings"] if finding["name"] == "scratch")
    assert scratch["trials"]["fresh"]["distances"] == {"2": "inf", "6": "inf", "20": "inf"}
    lines = found.markdown().splitlines()
    assert len(lines) == 2 + len(found.findings)
    assert len({line.count(" | ") for line in lines}) == 1
    assert "∞" in found.markdown()


def test_without_another_session_that_mode_is_left_out() -> None:
    found = Fingerprint.discover(Planted, planted.anchor, planted.probe, max_difference, EPS)
    assert set(found.needed) == planted.NEEDED
    assert found.anchors == (0,)
    assert all(Mode.FOREIGN not in finding.trials for finding in found.findings)
    assert "foreign" not in next(iter(found.rows()))


def test_distances() -> None:
    assert max_difference([1.0, 2.0], [1.0, 2.5]) == 0.5
    assert max_difference([1.0], [1.0, 1.0]) == math.inf
    assert max_difference([math.nan], [1.0]) == math.inf
    logits, other = np.log([[0.5, 0.5], [0.9, 0.1]]), np.log([[0.25, 0.75], [0.9, 0.1]])
    # hand: (0.5 ln 2 + 0.5 ln 2/3 + 0) / 2; tolerance is float64 rounding
    assert mean_divergence(logits + 3, other) == pytest.approx(0.25 * math.log(4 / 3), rel=1e-12)
    assert mean_divergence(logits, logits[:1]) == math.inf
    assert math.isinf(discover_nan().worst)


def discover_nan():
    """A distance that is no number counts as infinite."""
    from statebridge.sessions.fingerprint.bench import Bench

    bench = Bench(Planted, {2: planted.anchor}, planted.probe, lambda a, b: math.nan)
    return bench.trial({})
