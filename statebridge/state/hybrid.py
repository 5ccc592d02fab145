"""The state of a hybrid language model after it has read a prefix: H = (K, R, C, m).

A value: nothing that happens later to the cache or model it was read from changes it, and every operation
gives a new state. Batch is a real dimension; rows may have different lengths (left padding). Knows tensors
and bookkeeping, no models; `statebridge.capture` reads states from models and puts them back.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from statebridge.errors import StateMismatch
from statebridge.state.bookkeeping import Bookkeeping
from statebridge.state.layer import COMPONENTS, FIELDS, Component, LayerState

if TYPE_CHECKING:
    from typing import Self


@dataclass(frozen=True)
class HybridState:
    """State of all layers of a model for a batch of prefixes.

    Attributes
    ----------
    layers
        One `LayerState` per decoder layer.
    bookkeeping
        What was read, where and by whom.
    """

    layers: tuple[LayerState, ...]
    bookkeeping: Bookkeeping
    # this state and those that hold tensors of it, as `without` and `to` make them; empty where there are none
    _sharing: list[weakref.ref[HybridState]] = dataclasses.field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @property
    def batch_size(self) -> int:
        """Number of rows B."""
        return self.bookkeeping.batch_size

    @property
    def seen_tokens(self) -> torch.Tensor:
        """Real tokens read by each row, int64 [B]."""
        return self.bookkeeping.seen_tokens

    def validate(self) -> Self:
        """Check every tensor against the model's geometry and the bookkeeping; return the state itself.

        Raises
        ------
        StateMismatch
            When shapes, batch sizes or lengths disagree between components, or the state was given away.
        """
        book = self.bookkeeping
        if book.model.layers and not self.layers:
            raise StateMismatch(
                "this state's memory belongs to a cache that has gone on",
                {"layers": (len(book.model.layers), 0)},
                "Capture it again, or keep it: restore without consume, capture without borrow.",
            )
        differences = book.inconsistencies()
        if len(self.layers) != len(book.model.layers):
            differences["number of layers"] = (len(book.model.layers), len(self.layers))
        for index, (layer, spec) in enumerate(zip(self.layers, book.model.layers, strict=False)):
            for field, tensor in layer.tensors():
                shape = getattr(spec, field)
                if not shape:
                    expected: tuple[int, ...] | None = None
                elif FIELDS[field] == "K":
                    expected = (book.batch_size, shape[0], book.length, shape[1])
                else:
                    expected = (book.batch_size, *shape)
                if tuple(tensor.shape) != expected:
                    differences[f"layer {index} {field}"] = (expected, tuple(tensor.shape))
                elif not tensor.is_floating_point():
                    differences[f"layer {index} {field}"] = ("floating point", str(tensor.dtype))
            if (layer.key is None) != (layer.value is None):
                differences[f"layer {index}"] = ("key and value", "one of the two")
        if differences:
            raise StateMismatch("the parts of this state disagree", differences, "Capture it again.")
        return self

    def give_away(self) -> None:
        """Let go of the tensors, because a model changes them from now on; any later use is refused.

        Also of states that share tensors with this one, because they came from it by `without`, `to` or `map`, or it
        from them.
        """
        self.spending()()

    def spending(self) -> Callable[[], None]:
        """`give_away` for later: it keeps no state alive, and knows those that share tensors by then."""
        if not self._sharing:
            self._sharing.append(weakref.ref(self))
        sharing = self._sharing

        def spend() -> None:
            for state in (known() for known in sharing):
                if state is not None:
                    object.__setattr__(state, "layers", ())

        return spend

    @property
    def components(self) -> frozenset[Component]:
        """Components of which at least one tensor is present."""
        return frozenset(FIELDS[field] for layer in self.layers for field, _ in layer.tensors())

    @property
    def missing(self) -> frozenset[Component]:
        """Components that the model has and this state lacks in at least one layer."""
        absent: set[Component] = set()
        for layer, spec in zip(self.layers, self.bookkeeping.model.layers, strict=True):
            absent |= spec.components - layer.spec.components
        return frozenset(absent)

    def nbytes(self) -> dict[Component, int]:
        """Bytes of each component."""
        sizes: dict[Component, int] = dict.fromkeys(COMPONENTS, 0)
        for layer in self.layers:
            for field, tensor in layer.tensors():
                sizes[FIELDS[field]] += tensor.numel() * tensor.element_size()
        return sizes

    def map(self, function: Callable[[str, torch.Tensor], torch.Tensor]) -> Self:
        """A new state with `function(field, tensor)` in place of every tensor."""
        kept = False

        def seen(field: str, tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            result = function(field, tensor)
            kept |= result is tensor
            return result

        mapped = dataclasses.replace(self, layers=tuple(layer.map(seen) for layer in self.layers))
        return self._shares_with(mapped) if kept else mapped

    def clone(self) -> Self:
        """A state with memory of its own."""
        return self.map(lambda _, tensor: tensor.clone())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """The state on another device or with K and C in another dtype; R keeps its dtype.

        A recurrent buffer that is once given bfloat16 stays bfloat16 in the cache, so R is never cast.
        """

        def move(field: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(device=device, dtype=None if FIELDS[field] == "R" else dtype)

        return self.map(move)

    def without(self, *components: Component) -> Self:
        """A partial state that lacks `components`, for example `without("R", "C")` for KV only."""
        gone = frozenset(components)
        left = dataclasses.replace(self, layers=tuple(layer.without(gone) for layer in self.layers))
        return self._shares_with(left)

    def select(self, rows: Sequence[int] | torch.Tensor) -> Self:
        """The given rows, in the given order; padding that all of them share is dropped.

        Raises
        ------
        IndexError
            When a row does not exist, or none is given.
        """
        index = torch.as_tensor(rows, dtype=torch.int64).reshape(-1)
        if index.numel() == 0:
            raise IndexError("a state keeps at least one row")
        if bool((index >= self.batch_size).any()) or bool((index < -self.batch_size).any()):
            raise IndexError(f"rows {index.tolist()} of a state with {self.batch_size} rows")
        index = index % self.batch_size
        chosen = dataclasses.replace(
            self.map(lambda _, tensor: tensor.index_select(0, index.to(tensor.device))),
            bookkeeping=self.bookkeeping.select(index),
        )
        return chosen._trimmed()

    def repeat(self, times: int) -> Self:
        """Every row `times` times, copies beside each other (row order 0, 0, 1, 1, …)."""
        return self.select(torch.arange(self.batch_size).repeat_interleave(times))

    def split(self) -> list[Self]:
        """One state per row."""
        return [self.select([row]) for row in range(self.batch_size)]

    @classmethod
    def merge(cls, states: Iterable[HybridState]) -> HybridState:
        """All rows of several states of one model; shorter rows are padded on the left.

        Raises
        ------
        StateMismatch
            When the states belong to different models or hold different components.
        """
        parts = list(states)
        if not parts:
            raise ValueError("merge needs at least one state")
        for part in parts[1:]:
            for index, pair in enumerate(zip(parts[0].layers, part.layers, strict=False)):
                one, other = ({field: str(t.dtype) for field, t in layer.tensors()} for layer in pair)
                if one != other:
                    raise StateMismatch(
                        "these states cannot be merged",
                        {f"layer {index}": (one, other)},
                        "Merge states that hold the same components in the same dtypes.",
                    )
        longest = max(part.bookkeeping.length for part in parts)
        padded = [part._left_padded(longest - part.bookkeeping.length) for part in parts]
        bookkeeping = Bookkeeping.merged([part.bookkeeping for part in padded])
        layers = tuple(
            LayerState(
                **{
                    field: torch.cat([getattr(part.layers[i], field) for part in padded])
                    for field, _ in parts[0].layers[i].tensors()
                }
            )
            for i in range(len(parts[0].layers))
        )
        return cls(layers, bookkeeping)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state to one file, atomically (see `statebridge.state.file`)."""
        from statebridge.state.file import save_state

        save_state(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> HybridState:
        """Read a state file and check its digest (see `statebridge.state.file`)."""
        from statebridge.state.file import load_state

        return load_state(path, device)

    def __reduce__(self) -> tuple[type[Self], tuple[tuple[LayerState, ...], Bookkeeping]]:
        return type(self), (self.layers, self.bookkeeping)  # a copy shares nothing

    def _shares_with(self, other: Self) -> Self:
        """Remember that `other` holds tensors of this state; return it."""
        self._sharing[:] = [known for known in self._sharing if known() is not None] or [weakref.ref(self)]
        self._sharing.append(weakref.ref(other))
        object.__setattr__(other, "_sharing", self._sharing)
        return other

    def _left_padded(self, slots: int) -> Self:
        if slots == 0:
            return self

        def pad(field: str, tensor: torch.Tensor) -> torch.Tensor:
            # only keys and values have a token axis; R and C of a row do not know about padding
            return torch.nn.functional.pad(tensor, (0, 0, slots, 0)) if FIELDS[field] == "K" else tensor

        return dataclasses.replace(self.map(pad), bookkeeping=self.bookkeeping.left_padded(slots))

    def _trimmed(self) -> Self:
        used = self.bookkeeping.pad_mask.any(0)
        slots = int(used.int().argmax()) if bool(used.any()) else 0
        if slots == 0:
            return self

        def trim(field: str, tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:, :, slots:].clone() if FIELDS[field] == "K" else tensor

        return dataclasses.replace(self.map(trim), bookkeeping=self.bookkeeping.trimmed(slots))
