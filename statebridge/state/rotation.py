"""Rotary position embedding of cached keys: rotate, un-rotate, move.

Keys are cached after RoPE. A map that is fitted on keys must not see positions, so keys are un-rotated
before it and rotated again for the receiver. Convention of transformers ("rotate half"): with angle
θ_i = position · inv_freq_i, channel i of the rotary part pairs with channel i + rotary_dim / 2. Channels
beyond rotary_dim pass through. Multimodal models take the position of channel pair i from one of three
axes (time, height, width); for text the three are equal.

Knows positions and frequencies, no models. Source: Su et al., "RoFormer", arXiv 2104.09864.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RopeSpec:
    """Everything that fixes the rotation.

    Attributes
    ----------
    inv_freq
        Radians per position of each channel pair, rotary_dim / 2 values.
    attention_scaling
        Factor on cos and sin (1 except for YaRN and its kin).
    axis
        For multimodal rotary positions, the position axis (0 time, 1 height, 2 width) of each channel pair;
        () for plain text models.
    rope_type
        Name of the scheme in transformers, for example "default".
    """

    inv_freq: tuple[float, ...]
    attention_scaling: float = 1.0
    axis: tuple[int, ...] = ()
    rope_type: str = "default"

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that are rotated."""
        return 2 * len(self.inv_freq)

    def differences(self, other: RopeSpec) -> dict[str, tuple[Any, Any]]:
        """Fields that differ, each with (own value, the other's value)."""
        return {
            f"rope {field.name}": (getattr(self, field.name), getattr(other, field.name))
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RopeSpec:
        """Read the form that `dataclasses.asdict` and JSON give."""
        return cls(
            inv_freq=tuple(float(x) for x in data["inv_freq"]),
            attention_scaling=float(data["attention_scaling"]),
            axis=tuple(int(x) for x in data["axis"]),
            rope_type=str(data["rope_type"]),
        )


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of given positions, worked out once for the keys of all layers.

    Attributes
    ----------
    cos, sin
        Per position and rotary channel, float32 [B, 1, T, rotary_dim], `attention_scaling` included.
    scaling
        Factor on cos and sin.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    scaling: float = 1.0

    @classmethod
    def of(cls, positions: torch.Tensor, rope: RopeSpec, device: torch.device) -> Rotation:
        """The rotation to integer positions [B, T], or [3, B, T] for multimodal ones."""
        inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=device)
        positions = positions.to(device)
        if positions.ndim == 3:
            axis = torch.tensor(rope.axis or (0,) * len(rope.inv_freq), device=device)
            per_channel = positions[axis].permute(1, 2, 0).float()  # [B, T, rotary_dim / 2]
        else:
            per_channel = positions[..., None].float()  # [B, T, 1]
        angle = per_channel * inv_freq  # [B, T, rotary_dim / 2]
        angle = torch.cat((angle, angle), dim=-1)[:, None]  # [B, 1, T, rotary_dim]
        scaling = rope.attention_scaling
        return cls(angle.cos() * scaling, angle.sin() * scaling, scaling)

    @functools.cached_property
    def inverse(self) -> Rotation:
        """The rotation back, divided by the squared scaling (cos² + sin² = scaling²)."""
        norm = self.scaling**2
        return Rotation(self.cos / norm, -self.sin / norm, 1 / self.scaling)

    def apply(self, key: torch.Tensor) -> torch.Tensor:
        """Rotate keys [B, H, T, D], in float32, returned in their dtype."""
        rotary_dim = self.cos.shape[-1]
        turned, passed = key[..., :rotary_dim].float(), key[..., rotary_dim:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * self.cos + torch.cat((-second, first), dim=-1) * self.sin
        return torch.cat((turned.to(key.dtype), passed), dim=-1)  # [B, H, T, D]


def rotate(key: torch.Tensor, positions: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Rotate keys to their positions.

    Parameters
    ----------
    key
        Un-rotated keys [B, H, T, D].
    positions
        Integer positions [B, T], or [3, B, T] for multimodal ones.
    rope
        The rotation.

    Returns
    -------
    torch.Tensor
        Rotated keys [B, H, T, D] in the dtype of `key`, computed in float32.
    """
    return Rotation.of(positions, rope, key.device).apply(key)


def unrotate(key: torch.Tensor, positions: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Undo `rotate`."""
    return Rotation.of(positions, rope, key.device).inverse.apply(key)
