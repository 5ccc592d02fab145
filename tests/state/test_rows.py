"""select, repeat, merge and split against a plain model: a list of rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import IDENTITY, equal, random_state

from statebridge.errors import StateMismatch
from statebridge.state import HybridState

lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def rows_of(state: HybridState) -> list[tuple]:
    """Each row as plain values, padding left out: what the row is, whatever stands beside it."""
    rows = []
    book = state.bookkeeping
    for b in range(state.batch_size):
        real = book.pad_mask[b]
        parts = [
            book.token_ids[b][real].tolist(),
            book.positions[b][real].tolist(),
            int(book.next_position[b]),
        ]
        for layer in state.layers:
            for field, tensor in layer.tensors():
                row = tensor[b][:, real] if field in ("key", "value") else tensor[b]
                parts.append((field, row.tolist()))
        rows.append(tuple(map(str, parts)))
    return rows


@settings(max_examples=40, deadline=None)
@given(lengths, st.data())
def test_rows_stay_what_they_are(sizes: list[int], data: st.DataObject) -> None:
    """Bit-exact: rows are moved, never computed with."""
    state = random_state(sizes, seed=data.draw(st.integers(0, 99)))
    plain = rows_of(state)
    for _ in range(data.draw(st.integers(1, 4))):
        action = data.draw(st.sampled_from(["select", "repeat", "split and merge", "merge with self"]))
        n = len(plain)
        if action == "select":
            picked = data.draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=4))
            state, plain = state.select(picked), [plain[i] for i in picked]
        elif action == "repeat":
            times = data.draw(st.integers(1, 2))
            state, plain = state.repeat(times), [row for row in plain for _ in range(times)]
        elif action == "split and merge":
            order = data.draw(st.permutations(range(n)))
            parts = state.split()
            state, plain = HybridState.merge([parts[i] for i in order]), [plain[i] for i in order]
        else:
            state, plain = HybridState.merge([state, state]), plain * 2
        state.validate()
        assert rows_of(state) == plain
        # no slot is padding in every row, and padding is zero in K
        assert bool(state.bookkeeping.pad_mask.any(0)[0])
        for layer in state.layers:
            if layer.key is not None:
                assert not layer.key.transpose(1, 2)[~state.bookkeeping.pad_mask].any()


def test_split_then_merge_is_the_state() -> None:
    state = random_state([3, 6, 1])
    assert equal(HybridState.merge(state.split()), state)


def test_rows_share_no_memory_with_the_whole() -> None:
    state = random_state([4, 4])
    before = state.clone()
    for part in (*state.split(), state.select([1, 0]), state.repeat(1), HybridState.merge([state])):
        for layer in part.layers:
            layer.map(lambda _, tensor: tensor.zero_())
    assert equal(state, before)


def test_merge_refuses_what_differs() -> None:
    state = random_state([4])
    other = random_state([4], identity=dataclasses.replace(IDENTITY, weights="1" * 64))
    with pytest.raises(StateMismatch, match="weights: expected"):
        HybridState.merge([state, other])
    with pytest.raises(StateMismatch, match="recurrent_state"):
        HybridState.merge([state, state.without("R")])
    halved = state.map(lambda field, t: t.bfloat16() if field == "recurrent_state" else t)
    with pytest.raises(StateMismatch, match="bfloat16"):  # cat would promote without a word
        HybridState.merge([state, halved])
    with pytest.raises(StateMismatch, match="tokenizer"):
        HybridState.merge(
            [
                state,
                dataclasses.replace(state, bookkeeping=dataclasses.replace(state.bookkeeping, tokenizer="x")),
            ]
        )
    unknown = dataclasses.replace(state.bookkeeping, positions=None)
    with pytest.raises(StateMismatch, match="positions known"):
        HybridState.merge([state, dataclasses.replace(state, bookkeeping=unknown)])


@pytest.mark.parametrize("rows", [[], [2], [-3]])
def test_rows_that_do_not_exist(rows: list[int]) -> None:
    with pytest.raises(IndexError):
        random_state([2, 3]).select(rows)


FAULTS = {
    "positions shifted": lambda s: _book(s, next_position=s.bookkeeping.next_position + 1),
    "scalar length for ragged rows": lambda s: _book(s, next_position=torch.tensor([5, 5])),
    "positions cut": lambda s: _book(s, positions=s.bookkeeping.positions[:, 1:]),
    "positions as floats": lambda s: _book(s, positions=s.bookkeeping.positions.float() * float("nan")),
    "mask cut": lambda s: _book(s, pad_mask=s.bookkeeping.pad_mask[:, 1:]),
    "row without a token": lambda s: _book(s, pad_mask=s.bookkeeping.pad_mask & False),
    "ids of another batch": lambda s: _book(s, token_ids=s.bookkeeping.token_ids[:1]),
    "a key without its value": lambda s: _layer(s, 1, value=None),
    "keys one token short": lambda s: _layer(s, 1, key=s.layers[1].key[:, :, 1:]),
    "one attention layer shorter": lambda s: _layer(
        s, 2, key=s.layers[2].key[:, :, 1:], value=s.layers[2].value[:, :, 1:]
    ),
    "R transposed": lambda s: _layer(s, 0, recurrent_state=s.layers[0].recurrent_state.mT),
    "C one column short": lambda s: _layer(s, 0, conv_state=s.layers[0].conv_state[..., 1:]),
    "R of another batch": lambda s: _layer(s, 0, recurrent_state=s.layers[0].recurrent_state[:1]),
    "R as integers": lambda s: _layer(s, 0, recurrent_state=s.layers[0].recurrent_state.long()),
    "R where none belongs": lambda s: _layer(s, 3, recurrent_state=s.layers[0].recurrent_state),
    "a layer missing": lambda s: dataclasses.replace(s, layers=s.layers[:-1]),
}


def _book(state: HybridState, **changes) -> HybridState:
    return dataclasses.replace(state, bookkeeping=dataclasses.replace(state.bookkeeping, **changes))


def _layer(state: HybridState, index: int, **changes) -> HybridState:
    layers = list(state.layers)
    layers[index] = dataclasses.replace(layers[index], **changes)
    return dataclasses.replace(state, layers=tuple(layers))


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_disagree_are_refused(fault: str, tmp_path) -> None:
    broken = FAULTS[fault](random_state([5, 2]))
    with pytest.raises(StateMismatch, match="disagree"):
        broken.validate()
    with pytest.raises(StateMismatch):
        broken.save(tmp_path / "s.safetensors")
    assert list(tmp_path.iterdir()) == []
