"""Who a model is, as far as its state is concerned.

Two models with the same shapes but other weights or another rotary base accept each other's states without
a complaint and continue wrong; an identity tells them apart. It knows values only: reading one from a model
is the capture room's work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from statebridge.errors import StateMismatch
from statebridge.state.layer import LayerSpec
from statebridge.state.rotation import RopeSpec


@dataclass(frozen=True)
class ModelIdentity:
    """What must be equal for a state to be continued exactly.

    Attributes
    ----------
    model_type
        The family's name in transformers; the text part's, for a multimodal model.
    vocab_size
        Size of the input vocabulary.
    layers
        Geometry of the state, one entry per decoder layer.
    rope
        Rotary embedding of the attention layers, None for families without one.
    weights
        sha256 over sampled weight values, rounded to bfloat16 so that the same checkpoint in another dtype
        keeps its identity.
    name, revision
        Where the model came from. Informational: never compared.
    """

    model_type: str
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    rope: RopeSpec | None
    weights: str
    name: str = ""
    revision: str = ""

    def differences(self, other: ModelIdentity) -> dict[str, tuple[Any, Any]]:
        """Fields that differ, each with (own value, the other's value)."""
        found: dict[str, tuple[Any, Any]] = {}
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name in ("name", "revision") or mine == theirs:
                continue
            if field.name == "layers":
                found |= _layer_differences(mine, theirs)
            elif field.name == "rope" and mine is not None and theirs is not None:
                found |= mine.differences(theirs)
            else:
                found[field.name] = (mine, theirs)
        return found

    def require(self, other: ModelIdentity, what: str, remedy: str = "") -> None:
        """Raise `StateMismatch` naming every field in which `other` differs."""
        if differences := self.differences(other):
            raise StateMismatch(what, differences, remedy)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelIdentity:
        """Read the form that `dataclasses.asdict` and JSON give."""
        rope = data["rope"]
        return cls(
            model_type=str(data["model_type"]),
            vocab_size=int(data["vocab_size"]),
            layers=tuple(
                LayerSpec(**{name: tuple(int(n) for n in shape) for name, shape in layer.items()})
                for layer in data["layers"]
            ),
            rope=None if rope is None else RopeSpec.from_dict(rope),
            weights=str(data["weights"]),
            name=str(data["name"]),
            revision=str(data["revision"]),
        )


def _layer_differences(
    mine: tuple[LayerSpec, ...], theirs: tuple[LayerSpec, ...]
) -> dict[str, tuple[Any, Any]]:
    if len(mine) != len(theirs):
        return {"number of layers": (len(mine), len(theirs))}
    found: dict[str, tuple[Any, Any]] = {}
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        for field in dataclasses.fields(a):
            if getattr(a, field.name) != getattr(b, field.name):
                found[f"layer {index} {field.name} shape"] = (getattr(a, field.name), getattr(b, field.name))
    return found
