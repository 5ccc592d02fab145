"""State files: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

import copy
import json
import os
import stat

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synthetic import equal, random_state

from statebridge.errors import StateFileError
from statebridge.state import HybridState, inspect_state
from statebridge.state.file import _digest


@pytest.fixture
def saved(tmp_path):
    state = random_state([5, 3])
    path = tmp_path / "s.safetensors"
    state.save(path)
    return state, path


def parts(path) -> tuple[dict, bytes]:
    """Header and tensor bytes of a safetensors file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def write(path, header, body: bytes) -> None:
    """Put a safetensors file together again; `header` may be any JSON value or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


def rewrite(path, change, *, honest_digest: bool) -> None:
    """Apply `change(envelope, tensors)` to a file, with or without a digest that fits."""
    with safetensors.safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        envelope = json.loads(file.metadata()["statebridge"])
    change(envelope, tensors)
    if honest_digest:
        envelope["digest"] = _digest(envelope["header"], tensors)
    safetensors.torch.save_file(tensors, path, {"statebridge": json.dumps(envelope)})


def test_round_trip_is_bit_exact(saved) -> None:
    state, path = saved
    assert equal(HybridState.load(path), state)
    assert equal(HybridState.load(str(path)), state)  # a path given as text
    other = random_state([2], seed=1)
    other.save(str(path))
    assert equal(HybridState.load(path), other)  # an existing file is replaced
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("partial", [("R", "C"), ("K",), ("C",)])
def test_partial_states_stay_partial(tmp_path, partial) -> None:
    state = random_state([4]).without(*partial)
    state.save(tmp_path / "s")
    assert HybridState.load(tmp_path / "s").missing == set(partial)


def test_inspection_reads_the_header_alone(saved) -> None:
    state, path = saved
    info = inspect_state(path)
    assert info.header["seen_tokens"] == [5, 3]
    assert info.header["token_digests"] == list(state.bookkeeping.token_digests)
    assert info.header["bytes"] == state.nbytes()
    assert info.tensors["layers.1.key"] == ("BF16", (2, 2, 5, 8))
    header, body = parts(path)
    write(path, header, b"\xff" * len(body))
    assert inspect_state(path).digest == info.digest  # no tensor byte was looked at
    with pytest.raises(StateFileError, match="digest"):
        HybridState.load(path)


def test_a_view_is_not_saved_as_its_whole_buffer(tmp_path) -> None:
    long = random_state([4000])
    short = long.map(lambda field, t: t[:, :, :2] if field in ("key", "value") else t)
    HybridState(short.layers, random_state([2]).bookkeeping).save(tmp_path / "s")
    assert (tmp_path / "s").stat().st_size < 12_000  # the buffers of the views hold 352,000 bytes


def test_a_loaded_state_does_not_follow_its_file(saved) -> None:
    """safetensors maps files; writing into one must not reach a state that was loaded from it."""
    state, path = saved
    loaded = HybridState.load(path)
    header, body = parts(path)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size - len(body))
        file.write(b"\xff" * len(body))
    assert equal(loaded, state)
    assert header


def test_every_truncation_is_an_error(saved) -> None:
    _, path = saved
    raw = path.read_bytes()
    for size in [*range(0, 400, 7), *range(400, len(raw), 131), len(raw) - 1]:
        path.write_bytes(raw[:size])
        with pytest.raises(StateFileError, match=str(path.name)):
            HybridState.load(path)
    path.write_bytes(raw + b"\0")
    with pytest.raises(StateFileError):
        HybridState.load(path)


def test_every_flipped_bit_is_an_error_or_the_same_state(saved) -> None:
    """Never another tensor. A flip may also hit white space that nothing reads, hence "the same"."""
    state, path = saved
    raw = bytearray(path.read_bytes())
    body = len(raw) - 8 - int.from_bytes(raw[:8], "little")
    errors = 0
    # the length prefix bit by bit, then header and tensors in steps that are no power of two
    bits = [
        *range(64),
        *range(64, 8 * (len(raw) - body), 61),
        *range(8 * (len(raw) - body), 8 * len(raw), 67),
    ]
    for bit in bits:
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        raw[bit // 8] ^= 1 << bit % 8
        try:
            assert equal(HybridState.load(path), state)
        except StateFileError:
            errors += 1
    assert errors > 0.98 * len(bits)


def test_every_tensor_byte_is_under_the_digest(saved) -> None:
    _, path = saved
    header, body = parts(path)
    for position in range(0, len(body), 13):
        write(path, header, body[:position] + bytes([body[position] ^ 1]) + body[position + 1 :])
        with pytest.raises(StateFileError, match=r"digest|cannot be read"):
            HybridState.load(path)


EDITS = {
    "next position": lambda h, t: h["header"].update(seen_tokens=[9, 9]),
    "theta": lambda h, t: h["header"]["model"]["rope"].update(inv_freq=[1.0, 0.2]),
    "weights": lambda h, t: h["header"]["model"].update(weights="f" * 64),
    "schedule": lambda h, t: h["header"].update(schedule=[1, 4]),
    "a tensor left out": lambda h, t: t.pop("layers.0.conv_state"),
    "a tensor renamed": lambda h, t: t.update({"layers.2.key": t["layers.1.key"].clone()}),
    "two tensors exchanged": lambda h, t: t.update(
        {"layers.0.conv_state": t["layers.2.conv_state"], "layers.2.conv_state": t["layers.0.conv_state"]}
    ),
    "R as bfloat16": lambda h, t: t.update(
        {"layers.0.recurrent_state": t["layers.0.recurrent_state"].bfloat16()}
    ),
    "rows exchanged": lambda h, t: t.update({n: x.flip(0).contiguous() for n, x in t.items()}),
}


@pytest.mark.parametrize("edit", EDITS)
def test_hand_edits_are_noticed(saved, edit: str) -> None:
    _, path = saved
    rewrite(path, EDITS[edit], honest_digest=False)
    with pytest.raises(StateFileError, match="digest"):
        HybridState.load(path)


FORGERIES = {
    "an extra tensor": lambda h, t: t.update({"layers.0.extra": torch.zeros(1)}),
    "an extra bookkeeping tensor": lambda h, t: t.update({"bookkeeping.extra": torch.zeros(1)}),
    "a layer too many": lambda h, t: t.update({"layers.7.key": t["layers.1.key"].clone()}),
    "no token ids": lambda h, t: t.pop("bookkeeping.token_ids"),
    "NaN positions": lambda h, t: t.update(
        {"bookkeeping.positions": torch.full_like(t["bookkeeping.positions"], torch.nan, dtype=torch.float32)}
    ),
    "ids as floats": lambda h, t: t.update({"bookkeeping.token_ids": t["bookkeeping.token_ids"].float()}),
    "mask as integers": lambda h, t: t.update({"bookkeeping.pad_mask": t["bookkeeping.pad_mask"].long()}),
    "negative shape": lambda h, t: h["header"]["model"]["layers"][1].update(key=[-2, 8]),
    "keys without values": lambda h, t: t.pop("layers.1.value"),
    "another batch": lambda h, t: t.update({"layers.0.conv_state": t["layers.0.conv_state"][:1].clone()}),
    "no model": lambda h, t: h["header"].pop("model"),
    "layers of text": lambda h, t: h["header"]["model"].update(layers="abc"),
    "an unknown field": lambda h, t: h["header"]["model"]["layers"][0].update(evil=[1]),
    "endless sizes": lambda h, t: h["header"].update(schedule=[float("inf")]),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_nonsense_with_a_valid_digest_is_refused(saved, forgery: str) -> None:
    _, path = saved
    rewrite(path, FORGERIES[forgery], honest_digest=True)
    with pytest.raises(StateFileError, match="inconsistent"):
        HybridState.load(path)


def test_newer_and_foreign_files(saved, tmp_path) -> None:
    _, path = saved
    rewrite(path, lambda h, t: h.update(format_version=2), honest_digest=True)
    with pytest.raises(StateFileError, match=r"version 2.*upgrade"):
        HybridState.load(path)
    rewrite(path, lambda h, t: h.update(format="statebridge.other"), honest_digest=True)
    with pytest.raises(StateFileError, match="not a statebridge state"):
        HybridState.load(path)
    safetensors.torch.save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(StateFileError, match="not a statebridge state"):
        HybridState.load(path)
    torch.save({"a": torch.zeros(2)}, path)  # a pickle is never opened as one
    with pytest.raises(StateFileError, match="not a safetensors file"):
        HybridState.load(path)
    for missing in (tmp_path / "absent", tmp_path):
        with pytest.raises(StateFileError):
            HybridState.load(missing)


FOREVER = '{"format": "statebridge.state", "format_version": Infinity}'


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 200_000,
        b'{"__metadata__": {"statebridge": "' + b"[" * 100_000 + b'"}}',
        b"[]",
        b"null",
        b'{"__metadata__": null}',
        b'{"__metadata__": []}',
        b'{"__metadata__": {"statebridge": "7"}}',
        json.dumps({"__metadata__": {"statebridge": FOREVER}}).encode(),
        b'{"a": 3}',
        b"\xff\xfe{}",
    ],
)
def test_headers_that_are_no_headers(tmp_path, header: bytes) -> None:
    path = tmp_path / "s"
    write(path, header, b"")
    with pytest.raises(StateFileError):
        HybridState.load(path)


@pytest.mark.parametrize("size", [0, 1, 2**31, 2**63, 2**64 - 1])
def test_header_lengths_that_lie(saved, size: int) -> None:
    _, path = saved
    raw = path.read_bytes()
    path.write_bytes(size.to_bytes(8, "little") + raw[8:])
    with pytest.raises(StateFileError):
        HybridState.load(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_json_anywhere_is_an_error_or_harmless(saved, data: st.DataObject) -> None:
    """Replace one value somewhere in the header, digest made to fit: a state file error or a valid state."""
    state, path = saved
    state.save(path)

    def change(envelope, tensors):
        node, key = envelope, data.draw(st.sampled_from(["header", "digest", "format_version"]))
        while isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
            node = node[key]
            key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node[key] = copy.deepcopy(data.draw(json_values))

    try:
        rewrite(path, change, honest_digest=data.draw(st.booleans()))
    except (TypeError, ValueError, AttributeError):  # no digest of that header, so no such file
        return
    try:
        HybridState.load(path).validate()
        inspect_state(path)
    except StateFileError:
        pass


def test_permissions_are_those_of_any_new_file(tmp_path) -> None:
    old = os.umask(0o027)
    try:
        random_state([2]).save(tmp_path / "s")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o640
