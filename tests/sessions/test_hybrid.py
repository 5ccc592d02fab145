"""A hybrid state with its surroundings as buffers and back, bit-exact."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import tiny
import torch
from models import multimodal
from synthetic import equal, random_state
from toy import Toy

from statebridge.capture import continue_from, prefill
from statebridge.errors import StateMismatch, StoreError
from statebridge.sessions import Buffer, BufferKind, HybridSession, SessionStore


@pytest.fixture
def store(quick_path) -> SessionStore:
    return SessionStore(quick_path / "store", segment=4)


def through(store: SessionStore, session: HybridSession, **fresh) -> HybridSession:
    loaded = HybridSession(**fresh)
    loaded.load(store.restore(store.checkpoint(session)))
    return loaded


@pytest.mark.parametrize("lengths", [[1], [9], [9, 5, 1]])
@pytest.mark.parametrize("positions", ["text", "multimodal", "unknown"])
def test_states_come_back_bit_exactly(store, lengths, positions) -> None:
    state = random_state(lengths)
    book = state.bookkeeping
    if positions == "multimodal":
        book = dataclasses.replace(
            book, positions=torch.stack([book.positions, book.positions, book.positions])
        )
    elif positions == "unknown":
        book = dataclasses.replace(book, positions=None)
    state = dataclasses.replace(state, bookkeeping=dataclasses.replace(book, schedule=(1, 2), tokenizer="t"))
    pending = torch.arange(len(lengths) * 2).reshape(-1, 2)
    session = HybridSession(state, pending, clocks={"turn": 3, "seconds": 0.1})
    loaded = through(store, session)
    assert equal(loaded.state, state)
    assert torch.equal(loaded.pending, pending)
    assert loaded.clocks == {"turn": 3, "seconds": 0.1}
    assert type(loaded.clocks["turn"]) is int
    assert through(store, HybridSession(state)).pending is None


def test_growth_is_stored_once(store) -> None:
    """Only the open segment, R, C and other fixed buffers are written when a real model reads on."""
    model, ids = tiny.build("qwen3_5"), tiny.ids(1, 14)
    live = prefill(model, ids[:, :9])
    first = store.checkpoint(HybridSession(live.state()))
    live = continue_from(model, live, ids[:, 9:])
    second = store.checkpoint(HybridSession(live.state()), parent=first)
    one, other = (store.manifest(i) for i in (first, second))
    shared = set(one.blobs) & set(other.blobs)
    entries = {entry.spec.name: entry for entry in other.buffers}
    growing = [name for name, entry in entries.items() if entry.spec.grows is not None]
    assert sorted(growing) == [
        *(f"bookkeeping.{name}" for name in ("pad_mask", "positions", "token_ids")),
        "layers.3.key",
        "layers.3.value",
    ]
    for name in growing:
        assert [other.blobs[chunk.blob] in shared for chunk in entries[name].chunks] == [
            True,
            True,
            False,
            False,
        ]
    loaded = HybridSession()
    loaded.load(store.restore(second))
    assert equal(loaded.state, live.state())


def test_every_buffer_says_what_it_is() -> None:
    state = random_state([5])
    session = HybridSession(state, clocks={"turn": 1}, generators={"noise": torch.Generator()})
    specs = {buffer.name: buffer.spec for buffer in session.buffers()}
    kinds = {
        "layers.1.key": BufferKind.KV,
        "layers.1.value": BufferKind.KV,
        "layers.0.recurrent_state": BufferKind.RECURRENT,
        "layers.0.conv_state": BufferKind.WINDOW,
        "bookkeeping.token_ids": BufferKind.TOKENS,
        "bookkeeping.next_position": BufferKind.CLOCK,
        "clock.turn": BufferKind.CLOCK,
        "generator.noise": BufferKind.RANDOM,
        "ambient.torch": BufferKind.RANDOM,
        "ambient.threads": BufferKind.SETTINGS,
    }
    assert {name: specs[name].kind for name in kinds} == kinds
    assert specs["layers.0.conv_state"].dtype == "bfloat16"
    assert specs["layers.0.recurrent_state"].dtype == "float32"
    for name, spec in specs.items():
        assert bool(spec.derivable_from) == name.startswith("layers.")
        assert set(spec.derivable_from) <= set(specs)
        assert spec.cost == (5.0 if name.startswith("layers.") else 0.0)


def draws(generator: torch.Generator) -> list[object]:
    numbers = (torch.rand(3), torch.normal(0, 1, (3,)), torch.rand(2, generator=generator))
    drawn: list[object] = [number.tolist() for number in numbers]
    return [*drawn, random.random(), random.gauss(0, 1), np.random.rand(2).tolist(), np.random.randn()]


def test_every_random_state_goes_on(store) -> None:
    """Half-used normal pairs included, which live beside the states of python and numpy."""
    own = torch.Generator().manual_seed(5)
    draws(own)
    random.gauss(0, 1)
    np.random.randn()
    session = HybridSession(random_state([3]), generators={"own": own})
    identifier = store.checkpoint(session)
    expected = draws(own)
    threads = torch.get_num_threads()
    try:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        torch.set_num_threads(threads + 1)
        other = torch.Generator().manual_seed(9)
        HybridSession(generators={"own": other}).load(store.restore(identifier))
        assert torch.get_num_threads() == threads
        assert draws(other) == expected
        before = torch.get_rng_state()
        HybridSession(generators={"own": other}, ambient=False).load(store.restore(identifier))
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_num_threads(threads)


def test_sessions_from_the_same_buffers_share_no_memory(store) -> None:
    model = tiny.build("qwen3_5")
    session = HybridSession(prefill(model, tiny.ids(1, 9)).state())
    buffers = tuple(session.buffers())
    one, other = HybridSession(), HybridSession()
    one.load(buffers)
    other.load(buffers)
    for layer in one.state.layers:
        for _, tensor in layer.tensors():
            tensor.add_(1)
    one.state.bookkeeping.token_ids.add_(1)
    assert equal(other.state, session.state)
    assert equal(session.state, prefill(model, tiny.ids(1, 9)).state())


def replaced(buffers: tuple[Buffer, ...], name: str, *news: Buffer) -> tuple[Buffer, ...]:
    return (*(buffer for buffer in buffers if buffer.name != name), *news)


@pytest.mark.parametrize(
    ("name", "news", "error", "message"),
    [
        ("bookkeeping.token_ids", (), StoreError, "token_ids"),
        ("bookkeeping.header", (), StoreError, "header"),
        (
            "bookkeeping.header",
            (Buffer.json("bookkeeping.header", BufferKind.SETTINGS, {}),),
            StoreError,
            "model",
        ),
        ("layers.1.key", (), StateMismatch, "layer 1"),
        ("", (Buffer.of("layers.9.key", BufferKind.KV, 1.0),), StoreError, "unexpected"),
        ("", (Buffer.of("surprise", BufferKind.LATENT, 1.0),), StoreError, "surprise"),
        ("generator.own", (), StateMismatch, "generators"),
        (
            "generator.own",
            (Buffer.of("generator.own", BufferKind.RANDOM, np.zeros(9, np.uint8)),),
            StoreError,
            "RNG",
        ),
        (
            "ambient.torch",
            (Buffer.of("ambient.torch", BufferKind.RANDOM, np.zeros(9, np.uint8)),),
            StoreError,
            "RNG",
        ),
        (
            "ambient.python",
            (Buffer.json("ambient.python", BufferKind.RANDOM, [3, [1], None]),),
            StoreError,
            "state",
        ),
        ("ambient.numpy", (Buffer.json("ambient.numpy", BufferKind.RANDOM, {}),), StoreError, "state"),
        ("ambient.threads", (Buffer.json("ambient.threads", BufferKind.SETTINGS, 0),), StoreError, "threads"),
        (
            "",
            (Buffer.of("ambient.cuda.99", BufferKind.RANDOM, np.zeros(16, np.uint8)),),
            StateMismatch,
            "devices",
        ),
    ],
)
def test_what_cannot_be_loaded_changes_nothing(name, news, error, message) -> None:
    own = torch.Generator().manual_seed(2)
    buffers = tuple(HybridSession(random_state([3]), generators={"own": own}).buffers())
    old = random_state([4], seed=1)
    session = HybridSession(old, torch.tensor([[1]]), {"own": torch.Generator().manual_seed(1)}, {"turn": 1})
    before = tuple((b.name, b.data.tobytes()) for b in session.buffers())
    random.random()
    torch.rand(1)
    now = tuple(b.data.tobytes() for b in session.buffers() if b.name.startswith("ambient."))
    with pytest.raises(error, match=message):
        session.load(replaced(buffers, name, *news))
    assert tuple(b.data.tobytes() for b in session.buffers() if b.name.startswith("ambient.")) == now
    after = tuple((b.name, b.data.tobytes()) for b in session.buffers())
    assert [a for a in after if not a[0].startswith("ambient.")] == [
        b for b in before if not b[0].startswith("ambient.")
    ]
    if "cuda" in message or message == "devices":
        HybridSession(generators={"own": own}, ambient=False).load(replaced(buffers, name, *news))


def test_a_session_of_another_runtime_is_refused(store) -> None:
    with pytest.raises(StoreError, match="hybrid session"):
        HybridSession().load(store.restore(store.checkpoint(Toy().step(2))))
    with pytest.raises(StoreError, match="no state yet"):
        store.checkpoint(HybridSession())


def test_models_with_vision_keep_their_rope_deltas(store) -> None:
    from models import image_prompt

    model, prompt = multimodal(), image_prompt()
    with torch.no_grad():
        output = model(**prompt, use_cache=True)
    from statebridge.capture import capture
    from statebridge.capture.model import cache_of

    state = capture(model, cache_of(output), input_ids=prompt["input_ids"])
    loaded = through(store, HybridSession(state))
    assert int(state.bookkeeping.rope_deltas) != 0
    assert torch.equal(loaded.state.bookkeeping.rope_deltas, state.bookkeeping.rope_deltas)
    model.model.rope_deltas = torch.tensor([[40]])  # another prompt's, left on the model
    step = tiny.ids(1, 3).clamp(max=80)
    assert torch.equal(
        continue_from(model, loaded.state, step).logits, continue_from(model, state, step).logits
    )
