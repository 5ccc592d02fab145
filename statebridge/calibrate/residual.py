"""Identity-anchored residuals of one state component: x' = x + residual(x), where the residual starts at 0.

    key, value        X' = X + (X B) Uᵀ                        LowRank
    recurrent state   S' = S + U_L B_Lᵀ S + S B_R U_Rᵀ         TwoSided
    conv state        C'_j = C_j + a_j C_j + b_j               ChannelAffine

B are fixed orthonormal bases, drawn from a seed; U, a and b are trained and begin at 0. One residual serves
all heads, positions and rows of a layer. Knows tensors, no layers and no models.
Source: arXiv 2609.25053, the calibrator of experiment 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from statebridge.errors import ConfigError, StateFileError


class Residual(nn.Module, ABC):
    """A trainable residual; parameters are trained, buffers are fixed.

    Attributes
    ----------
    parts : tuple of str
        Names of its tensors, trained and fixed, in the order that the constructor takes them.
    """

    parts: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def identity(cls, shape: tuple[int, ...], rank: int, generator: torch.Generator) -> Self:
        """A residual that is 0.

        Parameters
        ----------
        shape
            Shape of the component in `LayerSpec`: (H, D), (H, K, V) or (C, W).
        rank
            Rank R of low-rank residuals.
        generator
            Draws the fixed bases.
        """

    @abstractmethod
    def residual(self, x: Tensor) -> Tensor:
        """The residual of `x`, in its shape, float32 or wider."""

    @abstractmethod
    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the residual was made for a component of this `LayerSpec` shape."""

    def forward(self, x: Tensor) -> Tensor:
        """`x` moved by its residual, in the dtype of `x`; bit for bit `x` where the residual is 0."""
        # x - (0 - r) and not x + r, because -0.0 + 0.0 is 0.0, another bit pattern
        return (_wide(x) - (0.0 - self.residual(x))).to(x.dtype)

    def moved(self, x: Tensor) -> Tensor:
        """Squared norm of the residual of each row, `[B]`."""
        return self.residual(x).square().flatten(1).sum(1)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {part: getattr(self, part).detach() for part in self.parts}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Rebuild a residual from what `tensors` returned.

        Raises
        ------
        StateFileError
            When a tensor is missing, left over, or not finite.
        """
        if set(tensors) != set(cls.parts):
            raise StateFileError(
                f"A {cls.__name__} consists of {', '.join(cls.parts)}, found {', '.join(sorted(tensors)) or 'none'}. "
                "Save the bridge again with this version of statebridge."
            )
        if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
            raise StateFileError(f"A {cls.__name__} holds NaN or infinity. Train the calibrator again.")
        return cls(*(tensors[part].float() for part in cls.parts))


class LowRank(Residual):
    """Residual of keys or values, X B Uᵀ.

    Parameters
    ----------
    basis, update
        B and U, `[D, R]` each.
    """

    parts = ("basis", "update")
    basis: Tensor
    update: nn.Parameter

    def __init__(self, basis: Tensor, update: Tensor) -> None:
        super().__init__()
        self.register_buffer("basis", basis.clone())
        self.update = nn.Parameter(update.clone())

    @classmethod
    def identity(cls, shape: tuple[int, ...], rank: int, generator: torch.Generator) -> Self:
        """A residual that is 0, for heads of D channels (shape (H, D))."""
        basis = _orthonormal(shape[-1], rank, generator)
        return cls(basis, torch.zeros_like(basis))

    def residual(self, x: Tensor) -> Tensor:
        """The residual of `x` `[B, H, T, D]`."""
        return self._coordinates(x) @ _like(self.update, x).mT

    def moved(self, x: Tensor) -> Tensor:
        """Squared norm of the residual of each row, `[B]`, without forming it: ‖Z Uᵀ‖² = tr(Zᵀ Z Uᵀ U)."""
        z, update = self._coordinates(x).flatten(1, -2), _like(self.update, x)  # [B, H*T, R]
        return ((z.mT @ z) * (update.mT @ update)).sum((1, 2))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether heads have D channels."""
        return len(shape) == 2 and self.basis.shape == self.update.shape == (shape[-1], *self.basis.shape[1:])

    def _coordinates(self, x: Tensor) -> Tensor:
        return _wide(x) @ _like(self.basis, x)  # [B, H, T, R]


class TwoSided(Residual):
    """Residual of recurrent matrices, U_L B_Lᵀ S + S B_R U_Rᵀ.

    Parameters
    ----------
    left_basis, left_update
        B_L and U_L, `[K, R]` each.
    right_basis, right_update
        B_R and U_R, `[V, R]` each.
    """

    parts = ("left_basis", "left_update", "right_basis", "right_update")
    left_basis: Tensor
    right_basis: Tensor
    left_update: nn.Parameter
    right_update: nn.Parameter

    def __init__(
        self, left_basis: Tensor, left_update: Tensor, right_basis: Tensor, right_update: Tensor
    ) -> None:
        super().__init__()
        self.register_buffer("left_basis", left_basis.clone())
        self.register_buffer("right_basis", right_basis.clone())
        self.left_update = nn.Parameter(left_update.clone())
        self.right_update = nn.Parameter(right_update.clone())

    @classmethod
    def identity(cls, shape: tuple[int, ...], rank: int, generator: torch.Generator) -> Self:
        """A residual that is 0, for K × V matrices (shape (H, K, V))."""
        left, right = (_orthonormal(size, rank, generator) for size in shape[-2:])
        return cls(left, torch.zeros_like(left), right, torch.zeros_like(right))

    def residual(self, x: Tensor) -> Tensor:
        """The residual of `x` `[B, H, K, V]`."""
        wide = _wide(x)
        from_left = _like(self.left_update, x) @ (_like(self.left_basis, x).mT @ wide)
        from_right = (wide @ _like(self.right_basis, x)) @ _like(self.right_update, x).mT
        return from_left + from_right

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether matrices are K × V."""
        sides = ((self.left_basis, self.left_update), (self.right_basis, self.right_update))
        return len(shape) >= 2 and all(
            basis.shape == update.shape == (size, *basis.shape[1:])
            for size, (basis, update) in zip(shape[-2:], sides, strict=True)
        )


class ChannelAffine(Residual):
    """Residual of convolution history, a_j C_j + b_j per channel j.

    Parameters
    ----------
    scale, shift
        a and b, `[C]` each.
    """

    parts = ("scale", "shift")

    def __init__(self, scale: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(scale.clone())
        self.shift = nn.Parameter(shift.clone())

    @classmethod
    def identity(cls, shape: tuple[int, ...], rank: int, generator: torch.Generator) -> Self:
        """A residual that is 0, for C channels (shape (C, W)); it has neither rank nor bases."""
        return cls(torch.zeros(shape[0]), torch.zeros(shape[0]))

    def residual(self, x: Tensor) -> Tensor:
        """The residual of `x` `[B, C, W]`."""
        return _wide(x) * _like(self.scale, x)[:, None] + _like(self.shift, x)[:, None]

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether there are C channels."""
        return len(shape) == 2 and self.scale.shape == self.shift.shape == (shape[0],)


def _orthonormal(size: int, rank: int, generator: torch.Generator) -> Tensor:
    """Orthonormal columns `[size, rank]`, float32."""
    if not 1 <= rank <= size:
        raise ConfigError(f"A residual of rank {rank} does not fit {size} dims; use a rank of 1 to {size}.")
    drawn = torch.randn(size, rank, generator=generator, dtype=torch.float64)
    basis: Tensor = torch.linalg.qr(drawn)[0]
    return basis.float().contiguous()  # safetensors takes nothing else


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _like(weight: Tensor, x: Tensor) -> Tensor:
    return weight.to(device=x.device, dtype=torch.promote_types(x.dtype, torch.float32))
