"""The video transformer: keys and values are derivable, the random state is state only where the sampler draws."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from statebridge.sessions.fingerprint import Fingerprint, Mode, Role, max_difference

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

pytest.importorskip("diffusers")

from experiments.fingerprint import anyflow


@pytest.fixture(scope="module")
def model():
    return anyflow.tiny_model()


def begin(rollout: anyflow.Rollout, seed: int = 1) -> None:
    rollout.begin(seed)
    rollout.step(1)


@pytest.mark.slow
@pytest.mark.parametrize("stochastic", [False, True])
def test_what_the_rollout_needs(model, stochastic) -> None:
    """Rebuilding K and V gives the same chunk, bit for bit: the same pass over the same latents."""
    found = Fingerprint.discover(
        functools.partial(anyflow.Rollout, model, stochastic),
        begin,
        lambda rollout: rollout.step().numpy(),
        max_difference,
        1e-6,
        other=functools.partial(begin, seed=2),
        group=lambda spec: spec.name.partition(".")[0],
    )
    assert found["kv"].role is Role.DERIVABLE
    assert found["kv"].trials[Mode.ZERO].worst > 0.01
    assert found["kv"].trials[Mode.DERIVED].worst == 0
    assert found["noise"].role is found["prompt"].role is found["latents"].role is Role.NEEDED
    generator = found["generator"]
    if stochastic:
        assert generator.role is Role.NEEDED
        assert generator.trials[Mode.FRESH].worst > 1
    else:
        assert generator.reason == "a new runtime has it already"
        assert generator.trials[Mode.FOREIGN].worst == 0
