"""What a hybrid language model needs between tokens, found without a hint; tiny models with asymmetric weights."""

from __future__ import annotations

import functools
import math

import pytest
import tiny
import torch

from statebridge.capture import continue_from, prefill
from statebridge.errors import StoreError
from statebridge.sessions import Buffer, BufferKind
from statebridge.sessions.adapters import buffer_tensor, tensor_buffer
from statebridge.sessions.fingerprint import Fingerprint, Growth, Mode, Role, max_difference
from statebridge.sessions.fingerprint.language import CacheRuntime
from statebridge.sessions.fingerprint.model import by_component, by_layer

NEXT = tiny.ids(2, 5, seed=9)
LENGTHS = (6, 24)
#: Above what another order of sums changes in float32, far below what a lost buffer does.
EPS = 1e-4


def anchor(runtime: CacheRuntime, length: int, seed: int = 1) -> None:
    """Two rows, the second padded by a third."""
    mask = torch.ones((2, length), dtype=torch.bool)
    mask[1, : length // 3] = False
    runtime.read(tiny.ids(2, length, seed), mask)


def at_lengths(seed: int):
    return {length: functools.partial(anchor, length=length, seed=seed) for length in LENGTHS}


def discover(family: str, group=by_component, derive=False) -> Fingerprint:
    model = tiny.build(family)
    return Fingerprint.discover(
        lambda: CacheRuntime(model, 2),
        at_lengths(1),
        lambda runtime: runtime.read(NEXT).numpy(),
        max_difference,
        EPS,
        other=at_lengths(2),
        group=group,
        derive=derive,
    )


@pytest.fixture(scope="module")
def hybrid() -> Fingerprint:
    return discover("qwen3_5")


def test_a_hybrid_needs_k_r_c_flags_position_and_mask(hybrid) -> None:
    tensors = {"key", "value", "recurrent_state", "conv_state"}
    assert set(hybrid.needed) == tensors | {"flags", "position", "pad_mask"}
    assert hybrid["token_ids"].role is hybrid["generator"].role is Role.SPARED
    for name in tensors:
        assert hybrid[name].trials[Mode.FOREIGN].worst > 0.1
    assert hybrid["key"].growth is Growth.GROWING
    assert hybrid["recurrent_state"].growth is hybrid["conv_state"].growth is Growth.FLAT
    assert hybrid.enough.worst == 0  # bit-exact: the same kernels on the same bytes


def test_a_flag_that_is_off_hides_the_tensors_in_silence(hybrid) -> None:
    flags = hybrid["flags"].trials[Mode.FRESH]
    assert not flags.errors
    assert flags.worst > 0.1


def test_an_attention_model_needs_no_r_and_no_c() -> None:
    found = discover("qwen3")
    assert set(found.needed) == {"key", "value", "position", "pad_mask"}


def test_layers_are_measured_one_by_one() -> None:
    found = discover("qwen3_5", by_layer)
    assert {f"layers.{i}.recurrent" for i in range(3)} | {"layers.3.attention"} <= set(found.needed)
    one = found["layers.0.recurrent"]
    assert one.members == tuple(
        f"layers.0.{field}"
        for field in (
            "recurrent_state",
            "conv_state",
            "has_previous_state",
            "is_conv_states_initialized",
            "is_recurrent_states_initialized",
        )
    )
    # a layer that starts anew is a finite distance away; nothing is refused
    assert EPS < one.trials[Mode.FRESH].worst < math.inf


def test_tokens_are_enough_for_a_runtime_that_may_read_again() -> None:
    found = discover("qwen3_5", derive=True)
    assert set(found.needed) == {"token_ids", "pad_mask"}
    assert found["recurrent_state"].role is Role.DERIVABLE
    assert found.greedy
    assert "computed again from it" in found["token_ids"].reason


def test_sampling_needs_the_random_state() -> None:
    """A greedy probe never reads it; a new runtime's differs once the session has drawn."""

    drawn = {6: lambda runtime: (anchor(runtime, 6), runtime.sample(NEXT[:, :1], 2))}
    model = tiny.build("qwen3_5")
    found = Fingerprint.discover(
        lambda: CacheRuntime(model, 2),
        drawn,
        lambda runtime: runtime.sample(NEXT[:, :1], 6).numpy(),
        max_difference,
        group=by_component,
        derive=False,
    )
    assert found["generator"].role is Role.NEEDED


def test_the_bare_runtime_reads_as_the_library_does() -> None:
    """Same logits as `prefill` and `continue_from`, bit-exact: the same passes over the same padded rows."""
    model = tiny.build("qwen3_5")
    runtime = CacheRuntime(model, 2)
    anchor(runtime, 24)
    mask = torch.ones((2, 24), dtype=torch.bool)
    mask[1, :8] = False
    state = prefill(model, tiny.ids(2, 24, 1), mask).state()
    assert torch.equal(runtime.read(NEXT), continue_from(model, state, NEXT).logits)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
def test_empty_tensors_are_buffers_too(dtype) -> None:
    buffer: Buffer = tensor_buffer("none", BufferKind.TOKENS, torch.zeros((2, 0), dtype=dtype))
    back = buffer_tensor(buffer)
    assert back.shape == (2, 0)
    assert back.dtype == dtype


@pytest.mark.parametrize(
    "name", ["model", "read", "layers.0", "layers.99.key", "layers.0.forward", "layers.x.key"]
)
def test_a_buffer_of_another_name_is_refused(name) -> None:
    """Names come from files: none of them may reach an attribute that is no buffer."""
    runtime = CacheRuntime(tiny.build("qwen3_5"))
    before = runtime.model
    with pytest.raises(StoreError, match="load it elsewhere"):
        runtime.load([tensor_buffer(name, BufferKind.KV, torch.zeros(1, 2, 3, 4))])
    assert runtime.model is before
