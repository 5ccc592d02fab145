"""State files: one `.safetensors` file per state, described in docs/state_file.md.

Tensors are named `layers.<index>.<field>` and `bookkeeping.<field>`. One metadata entry, `statebridge`, is a
JSON object with the format version, the header and a sha256 over the header and every tensor; loading checks
it. Saving replaces the file as a whole. Nothing in a file is executed; every name, shape and dtype is checked
before it is used.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file

from statebridge.errors import StateFileError, StateMismatch
from statebridge.state.atomic import atomic_file
from statebridge.state.bookkeeping import Bookkeeping
from statebridge.state.hybrid import HybridState
from statebridge.state.identity import ModelIdentity
from statebridge.state.layer import FIELDS, LayerState

__all__ = ["StateFileInfo", "atomic_file", "inspect_state", "load_state", "save_state"]

FORMAT = "statebridge.state"
FORMAT_VERSION = 1
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format
_TENSOR_NAME = re.compile(r"layers\.(\d{1,6})\.([a-z_]+)")
#: What reading JSON of unexpected shape can raise.
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_BOOKKEEPING = ("token_ids", "pad_mask", "positions", "next_position")


@dataclass(frozen=True)
class StateFileInfo:
    """What the header of a state file says; its digest has not been checked.

    Attributes
    ----------
    path, nbytes
        The file and its size in bytes.
    header
        Bookkeeping that fits into JSON: model identity, schedule, layout, backend, seen tokens, digests.
    tensors
        Name -> (dtype, shape) of every tensor.
    digest
        sha256 that loading will check.
    """

    path: Path
    nbytes: int
    header: Mapping[str, Any]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    digest: str


def save_state(state: HybridState, path: str | os.PathLike[str]) -> None:
    """Write `state` to `path`, atomically.

    Raises
    ------
    StateMismatch
        When the parts of the state disagree.
    StateFileError
        When the file cannot be written; the old file, if any, is untouched.
    """
    state.validate()
    tensors = {name: _owned(tensor) for name, tensor in named_tensors(state)}
    header = state_header(state)
    envelope = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "digest": _digest(header, tensors),
        "header": header,
    }
    target = Path(path)
    with atomic_file(target) as temporary:
        try:
            save_file(tensors, temporary, metadata={"statebridge": json.dumps(envelope)})
        except safetensors.SafetensorError as error:
            raise OSError(str(error)) from error  # safetensors wraps what the disk said


def load_state(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> HybridState:
    """Read a state file and check its digest.

    Raises
    ------
    StateFileError
        When the file is truncated, corrupt, edited, of another kind, or newer than this library.
    """
    info = inspect_state(path)
    try:
        with safetensors.safe_open(info.path, framework="pt", device="cpu") as file:
            # clones, because safetensors gives views of the mapped file, which a later write would change
            tensors = {name: file.get_tensor(name).clone() for name in info.tensors}
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError, AttributeError) as error:
        raise StateFileError(f"{path} cannot be read ({error}); capture and save the state again.") from error
    if _digest(info.header, tensors) != info.digest:
        raise StateFileError(
            f"{path} does not match its digest, so it was changed after saving; save it again."
        )
    try:
        state = assemble(info.header, tensors)
        return state.validate().to(device)
    except (*_MALFORMED, StateMismatch) as error:
        raise StateFileError(f"{path} holds an inconsistent state ({error}); capture it again.") from error


def inspect_state(path: str | os.PathLike[str]) -> StateFileInfo:
    """Read the header of a state file alone; no tensor is touched and no digest checked.

    Raises
    ------
    StateFileError
        When the file is not a readable state file of this or an older format version.
    """
    raw, nbytes = _read_safetensors_header(Path(path))
    metadata = raw.pop("__metadata__", {})
    try:
        envelope = json.loads(metadata["statebridge"])
        kind, version = envelope["format"], int(envelope["format_version"])
    except (*_MALFORMED, RecursionError) as error:
        raise StateFileError(f"{path} is a safetensors file, but not a statebridge state.") from error
    if kind != FORMAT:
        raise StateFileError(f"{path} holds {kind!r}, not a statebridge state.")
    if version > FORMAT_VERSION:
        raise StateFileError(
            f"{path} has format version {version}, this library reads up to {FORMAT_VERSION}; "
            "upgrade statebridge to read it."
        )
    try:
        tensors = {str(n): (str(t["dtype"]), tuple(int(d) for d in t["shape"])) for n, t in raw.items()}
        return StateFileInfo(Path(path), nbytes, dict(envelope["header"]), tensors, str(envelope["digest"]))
    except _MALFORMED as error:
        raise StateFileError(f"{path} has a malformed header ({error!r}); save the state again.") from error


def named_tensors(state: HybridState) -> Iterator[tuple[str, torch.Tensor]]:
    for index, layer in enumerate(state.layers):
        for field, tensor in layer.tensors():
            yield f"layers.{index}.{field}", tensor
    for field in _BOOKKEEPING:
        tensor = getattr(state.bookkeeping, field)
        if tensor is not None:
            yield f"bookkeeping.{field}", tensor


def _owned(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU tensor that is no view, so that a small slice never writes its whole buffer."""
    tensor = tensor.detach().cpu().contiguous()
    whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if whole else tensor.clone()


def state_header(state: HybridState) -> dict[str, Any]:
    book = state.bookkeeping
    header = {
        "model": dataclasses.asdict(book.model),
        "tokenizer": book.tokenizer,
        "schedule": book.schedule,
        "conv_layout": book.conv_layout,
        "recurrent_axes": book.recurrent_axes,
        "backend": book.backend,
        "batch_size": book.batch_size,
        "length": book.length,
        "seen_tokens": book.seen_tokens.tolist(),
        "rope_deltas": book.rope_deltas.tolist(),
        "token_digests": book.token_digests,
        "initialized": [sorted(layer.spec.components) for layer in state.layers],
        "bytes": state.nbytes(),
    }
    # through JSON once, so that the digest sees what a reader will see
    normal: dict[str, Any] = json.loads(json.dumps(header))
    return normal


def _digest(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> str:
    sha = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def assemble(header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> HybridState:
    model = ModelIdentity.from_dict(header["model"])
    fields: list[dict[str, torch.Tensor]] = [{} for _ in model.layers]
    for name, tensor in tensors.items():
        if name in {f"bookkeeping.{field}" for field in _BOOKKEEPING}:
            continue
        match = _TENSOR_NAME.fullmatch(name)
        if match is None or match[2] not in FIELDS or int(match[1]) >= len(fields):
            raise ValueError(f"unexpected tensor {name!r}")
        fields[int(match[1])][match[2]] = tensor
    bookkeeping = Bookkeeping(
        token_ids=tensors["bookkeeping.token_ids"],
        pad_mask=tensors["bookkeeping.pad_mask"],
        positions=tensors.get("bookkeeping.positions"),
        next_position=tensors["bookkeeping.next_position"],
        model=model,
        tokenizer=str(header["tokenizer"]),
        schedule=tuple(int(n) for n in header["schedule"]),
        conv_layout=tuple((str(n), int(start), int(size)) for n, start, size in header["conv_layout"]),
        recurrent_axes=str(header["recurrent_axes"]),
        backend=tuple((str(a), str(b)) for a, b in header["backend"]),
    )
    return HybridState(tuple(LayerState(**layer) for layer in fields), bookkeeping)


def _read_safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    try:
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= min(_MAX_HEADER_BYTES, nbytes - 8):
                raise StateFileError(f"{path} is truncated or not a safetensors file.")
            header = json.loads(file.read(size))
    except FileNotFoundError as error:
        raise StateFileError(f"{path} does not exist.") from error
    except OSError as error:
        raise StateFileError(f"{path} cannot be read ({error}).") from error
    except (ValueError, RecursionError) as error:
        raise StateFileError(f"{path} is truncated or not a safetensors file.") from error
    if not isinstance(header, dict):
        raise StateFileError(f"{path} is truncated or not a safetensors file.")
    return header, nbytes
