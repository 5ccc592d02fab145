"""What a session is to the store: named buffers, and nothing else.

A buffer is bytes with a name, a kind, a dtype and a shape. Random-number states and clocks are buffers like
any other, so one store serves hybrid language models and world models alike. A buffer that grows names the
axis it grows along: the store cuts it there, so that two checkpoints of one session share their prefix. A
buffer also says what it could be derived from and at what cost; whether to keep it is the caller's choice.

Knows bytes and numpy, no tensors and no models.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from statebridge.errors import StoreError

Bytes = npt.NDArray[np.uint8]

#: Size of one element by dtype name. Names are those of torch, so that bfloat16 and float8 have one.
ITEM_BYTES: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
_NAME = re.compile(r"[A-Za-z0-9_]+([.:@-][A-Za-z0-9_]+)*")
_LONGEST_NAME = 200


class BufferKind(StrEnum):
    """What a buffer is to the runtime that owns it."""

    KV = "kv"  # keys and values that grow with the session
    RECURRENT = "recurrent"  # memory of fixed size, updated in place
    WINDOW = "window"  # the latest entries only: convolution history, rolling caches
    LATENT = "latent"  # generated content: clean latents, frames
    RETRIEVAL = "retrieval"  # a bank that is searched: poses, embeddings, actions
    RANDOM = "random"  # random-number states, noise drawn ahead
    CLOCK = "clock"  # positions and counters that are not a length
    TOKENS = "tokens"  # token ids and their masks
    SETTINGS = "settings"  # identities, schedules, layouts


@dataclass(frozen=True)
class BufferSpec:
    """A buffer without its content.

    Attributes
    ----------
    name
        Unique in the session: words of letters, digits and `_`, joined by one of `. : @ -`.
    kind
        What it is to the runtime.
    dtype
        A key of `ITEM_BYTES`.
    shape
        Axis lengths, row-major.
    grows
        Axis along which the session appends and never changes what is there; None for a buffer of fixed size.
    derivable_from
        Names of the buffers that it could be computed from; () when it cannot be.
    cost
        Work of deriving it, in the runtime's own unit (tokens to read again, frames to encode).

    Raises
    ------
    StoreError
        When a field is not what it says here.
    """

    name: str
    kind: BufferKind
    dtype: str
    shape: tuple[int, ...]
    grows: int | None = None
    derivable_from: tuple[str, ...] = ()
    cost: float = 0.0

    def __post_init__(self) -> None:
        for name in (self.name, *self.derivable_from):
            if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
                raise StoreError(
                    f"{name[:80]!r} is no buffer name; use words of letters, digits and _ joined by one of . : @ -"
                )
        if self.dtype not in ITEM_BYTES:
            raise StoreError(
                f"Buffer {self.name} has the unknown dtype {self.dtype!r}; give its bytes as uint8."
            )
        if len(self.shape) > 32 or any(axis < 0 or axis >= 2**48 for axis in self.shape):
            raise StoreError(f"Buffer {self.name} has the shape {self.shape}, which no array can have.")
        if self.grows is not None and not 0 <= self.grows < len(self.shape):
            raise StoreError(f"Buffer {self.name} grows along axis {self.grows}, which {self.shape} lacks.")
        if not (math.isfinite(self.cost) and self.cost >= 0):
            raise StoreError(f"Buffer {self.name} has the cost {self.cost}; give a finite number from 0.")

    @property
    def nbytes(self) -> int:
        """Bytes of the content."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, eq=False)
class Buffer:
    """A named buffer with its content.

    Attributes
    ----------
    spec
        Name, kind, dtype, shape.
    data
        Row-major content as flat uint8 [nbytes]; the session keeps it unchanged while it is being stored.
    """

    spec: BufferSpec
    data: Bytes

    def __post_init__(self) -> None:
        if self.data.dtype != np.uint8 or self.data.shape != (self.spec.nbytes,):
            raise StoreError(
                f"Buffer {self.spec.name} needs {self.spec.nbytes} bytes as flat uint8, found "
                f"{self.data.shape} of {self.data.dtype}."
            )

    @property
    def name(self) -> str:
        """Name of the buffer."""
        return self.spec.name

    @classmethod
    def of(cls, name: str, kind: BufferKind, array: npt.ArrayLike, **spec: Any) -> Buffer:
        """A buffer over a numpy array or scalar, without a copy where its memory is row-major."""
        values = np.asarray(array)
        native = np.asarray(values, dtype=values.dtype.newbyteorder("="), order="C")
        flat = native.reshape(-1).view(np.uint8)
        return cls(BufferSpec(name, kind, str(native.dtype), native.shape, **spec), flat)

    @classmethod
    def json(cls, name: str, kind: BufferKind, value: Any) -> Buffer:
        """A buffer over a JSON value."""
        return cls.of(name, kind, np.frombuffer(json.dumps(value, sort_keys=True).encode(), np.uint8))

    def array(self) -> npt.NDArray[Any]:
        """The content as a numpy array; numpy has no bfloat16 and no float8."""
        try:
            return self.data.view(np.dtype(self.spec.dtype)).reshape(self.spec.shape)
        except TypeError as error:
            raise StoreError(f"numpy has no {self.spec.dtype}; read the bytes of {self.name}.") from error

    def value(self) -> Any:
        """The content as a JSON value.

        Raises
        ------
        StoreError
            When it is not JSON.
        """
        try:
            return json.loads(self.data.tobytes())
        except (ValueError, RecursionError) as error:
            raise StoreError(f"Buffer {self.name} does not hold JSON ({error}).") from error


class Session(Protocol):
    """Anything that can give its buffers and take them back."""

    def buffers(self) -> Iterable[Buffer]:
        """Every buffer that a continuation needs, at a moment when none is half written."""

    def load(self, buffers: Iterable[Buffer]) -> None:
        """Become the session that gave these buffers."""


def random_last(buffers: Iterable[Buffer]) -> list[Buffer]:
    """The same buffers, random states after all others: what loads before them may draw."""
    return sorted(buffers, key=lambda buffer: buffer.spec.kind is BufferKind.RANDOM)
