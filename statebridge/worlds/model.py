"""A small action-conditioned video diffusion transformer that is causal over chunks.

Tokens are 8 x 8 pixel patches; the tokens of a chunk see each other and a history of clean chunks. The network
predicts the clean chunk x0 from x_σ = (1 - σ) x0 + σ noise. At σ = 0 the same pass writes the chunk's keys and
values, which are all that later chunks see of it. Blocks are pre-norm with adaptive scales whose projection is
shared by all layers (AdaLN-zero; each layer adds a table of its own); queries and keys are RMS-normed; keys
leave the block un-rotated.

Knows one chunk and a `History`; the schedule, the session and what is remembered live elsewhere. Sources:
Peebles and Xie, arXiv 2212.09748 (AdaLN-zero); Chen et al., arXiv 2310.00426 (shared modulation).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 (its usual name)

from statebridge.errors import ConfigError
from statebridge.worlds.cache import ChunkKV, History, HistoryCache
from statebridge.worlds.conditioning import FEATURES, Conditioning
from statebridge.worlds.geometry import Camera, Grid
from statebridge.worlds.rotary import Rotary, rotate

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries, keys and values [B, H, T, D], not rotated, to the attended values [B, H, T, D]."""

ACTIONS = 5


@dataclass(frozen=True)
class WorldConfig:
    """Shape of the denoiser.

    Attributes
    ----------
    width
        Channels of a token; heads x rotary.head_dim.
    layers, heads
        Blocks, and attention heads of each.
    expansion
        Hidden channels of the MLP over `width`.
    camera, grid, rotary
        What a token is and where it is.

    Raises
    ------
    ConfigError
        When width and heads do not fit the rotary channels, or frames do not fit the grid.
    """

    width: int = 256
    layers: int = 8
    heads: int = 4
    expansion: int = 4
    camera: Camera = field(default_factory=Camera)
    grid: Grid = field(default_factory=Grid)
    rotary: Rotary = field(default_factory=Rotary)

    def __post_init__(self) -> None:
        if self.width != self.heads * self.rotary.head_dim:
            raise ConfigError(
                f"Width {self.width} is not {self.heads} heads of {self.rotary.head_dim} channels; change one."
            )
        if {self.grid.rows * self.grid.patch, self.grid.columns * self.grid.patch} != {self.camera.size}:
            raise ConfigError(f"The grid {self.grid} does not cover frames of {self.camera.size} pixels.")


class Block(nn.Module):
    """One transformer block; attention is handed in, so that it can be cached, masked or blocked."""

    def __init__(self, config: WorldConfig) -> None:
        super().__init__()
        d, D = config.width, config.rotary.head_dim
        self.heads = config.heads
        self.table = nn.Parameter(torch.zeros(6, d))
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.out = nn.Linear(d, d, bias=False)
        self.up = nn.Linear(d, config.expansion * d)
        self.down = nn.Linear(config.expansion * d, d)
        self.q_scale = nn.Parameter(torch.ones(D))
        self.k_scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor, modulation: Tensor, attend: Attend) -> Tensor:
        """Tokens [B, G, T, d] of G chunks with modulation [B, G, 6, d] to tokens of the same shape."""
        B, G, T, d = x.shape
        table = (modulation + self.table.to(modulation.dtype))[:, :, None]  # [B, G, 1, 6, d]
        shift, scale, gate, shift2, scale2, gate2 = table.unbind(-2)
        h = F.layer_norm(x, (d,)) * (1 + scale) + shift
        qkv = self.qkv(h).view(B, G * T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)  # [B, H, G T, D]
        mixed = attend(_normed(q, self.q_scale), _normed(k, self.k_scale), v)
        x = x + gate * self.out(mixed.transpose(1, 2).reshape(B, G, T, d))
        h = F.layer_norm(x, (d,)) * (1 + scale2) + shift2
        out: Tensor = x + gate2 * self.down(F.gelu(self.up(h), approximate="tanh"))
        return out


def _normed(x: Tensor, scale: Tensor) -> Tensor:
    """RMS norm over the channels of a head, computed in float32."""
    return (F.rms_norm(x.float(), (x.shape[-1],)) * scale.float()).to(x.dtype)


class WorldModel(nn.Module):
    """The denoiser."""

    def __init__(self, config: WorldConfig | None = None) -> None:
        super().__init__()
        config = config or WorldConfig()
        d = config.width
        self.config = config
        self._digest: tuple[tuple[tuple[int, int], ...], str] | None = None
        self.patch_in = nn.Linear(config.grid.channels, d)
        self.ray_in = nn.Sequential(nn.Linear(FEATURES, d), nn.SiLU(), nn.Linear(d, d))
        self.action_in = nn.Embedding(ACTIONS, d)
        self.sigma_in = nn.Sequential(nn.Linear(64, d), nn.SiLU(), nn.Linear(d, d))
        self.modulation = nn.Linear(d, 6 * d)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.last_table = nn.Parameter(torch.zeros(2, d))
        self.patch_out = nn.Linear(d, config.grid.channels)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.action_in.weight, std=0.5)
        for last in (self.modulation, self.patch_out):
            nn.init.zeros_(last.weight)  # every block starts as the identity

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights, and of the keys and values that a pass writes."""
        return self.patch_in.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.patch_in.weight.device

    def digest(self) -> str:
        """What tells this model from any other: shape and weights, these rounded to float16."""
        written = tuple((p.data_ptr(), p._version) for p in self.parameters())
        if self._digest is None or self._digest[0] != written:  # hashing takes longer than a small step
            found = hashlib.sha256(repr(self.config).encode())
            for parameter in self.parameters():
                found.update(parameter.detach().half().cpu().contiguous().numpy().tobytes())
            self._digest = (written, found.hexdigest())
        return self._digest[1]

    def empty_cache(self, batch: int = 1) -> HistoryCache:
        """A history of nothing, in the shape that this model reads."""
        c = self.config
        return HistoryCache.empty(c.layers, c.heads, c.rotary.head_dim, batch, self.dtype, self.device)

    def embed(self, tokens: Tensor, conditioning: Conditioning) -> Tensor:
        """Noisy or clean patches [B, T, channels] to input tokens [B, T, d]."""
        c = self.config
        rays = conditioning.features(c.camera, c.grid).to(self.dtype)
        actions = self.action_in(conditioning.actions).repeat_interleave(c.grid.frame_tokens, dim=1)
        out: Tensor = self.patch_in(tokens.to(self.dtype)) + self.ray_in(rays) + actions
        return out

    def modulate(self, sigma: Tensor) -> tuple[Tensor, Tensor]:
        """Noise levels [...] to the blocks' modulation [..., 6, d] and the last layer's [..., 2, d]."""
        frequencies = torch.exp(torch.arange(32, device=sigma.device) * (-math.log(1e4) / 32))
        phase = sigma.float()[..., None] * 1000 * frequencies
        level = self.sigma_in(torch.cat([phase.cos(), phase.sin()], dim=-1).to(self.dtype))
        shared = self.modulation(F.silu(level)).unflatten(-1, (6, self.config.width))
        return shared, level[..., None, :] + self.last_table.to(level.dtype)

    def decode(self, x: Tensor, last: Tensor) -> Tensor:
        """Tokens [B, G, T, d] of the last block to clean patches float32 [B, G, T, channels]."""
        shift, scale = last[:, :, None].unbind(-2)
        h = F.layer_norm(x, (x.shape[-1],)) * (1 + scale) + shift
        patches: Tensor = self.patch_out(h)
        return patches.float()

    def forward(
        self,
        frames: Tensor,
        sigma: Tensor,
        conditioning: Conditioning,
        history: History = (),
        number: int | None = None,
    ) -> tuple[Tensor, ChunkKV]:
        """Predict the clean frames of one chunk.

        Parameters
        ----------
        frames
            Noisy frames [B, F, 3, size, size] in [-1, 1] plus noise.
        sigma
            Noise level of each row, float32 [B]; 0 for a clean pass.
        conditioning
            Actions, poses and times of these frames.
        history
            What `HistoryCache.read` gave; () when nothing came before.
        number
            Number of the chunk, for the keys and values that come back; None where nobody keeps them.

        Returns
        -------
        x0
            Predicted clean frames, float32, the shape of `frames`.
        written
            Raw keys and values of this chunk. Only those of a pass at σ = 0 may be appended to a history.
        """
        c = self.config
        coordinates = conditioning.coordinates(c.camera, c.grid)
        cos, sin = c.rotary.angles(coordinates)
        keys: list[Tensor] = []
        values: list[Tensor] = []

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            layer = len(keys)
            keys.append(k)
            values.append(v)
            return attend_history(layer, rotate(q, cos, sin), rotate(k, cos, sin), v, history)

        x = self.embed(c.grid.patchify(frames), conditioning)[:, None]  # [B, 1, T, d]
        modulation, last = self.modulate(sigma[:, None])
        for block in self.blocks:
            x = block(x, modulation, attend)
        x0 = c.grid.unpatchify(self.decode(x, last)[:, 0])
        chunk = -1 if number is None else number
        n = frames.shape[1]
        index = torch.arange(max(chunk, 0) * n, max(chunk, 0) * n + n, device=frames.device)
        written = ChunkKV(
            tuple(keys),
            tuple(values),
            coordinates,
            index.repeat_interleave(c.grid.frame_tokens),
            chunk,
            # a device has to wait to tell a time, so it is asked only where the chunk is kept
            math.nan if number is None else float(conditioning.times[0, -1]) + 1.0,
        )
        return x0, written


def attend_history(layer: int, q: Tensor, k: Tensor, v: Tensor, history: History) -> Tensor:
    """Attention of a chunk over a history and itself, [B, H, T, D], keys and queries rotated."""
    if not history:
        return F.scaled_dot_product_attention(q, k, v)
    out = torch.empty_like(q) if len(history) > 1 else None
    for group in history:
        heads = list(group.heads[layer])
        if not heads:
            continue
        own = (q, k, v) if len(heads) == q.shape[1] else (q[:, heads], k[:, heads], v[:, heads])
        key = torch.cat([group.keys[layer].to(q.dtype), own[1]], dim=2)
        value = torch.cat([group.values[layer].to(q.dtype), own[2]], dim=2)
        mask = None
        if group.valid is not None:  # padding takes no part in the softmax
            mask = F.pad(group.valid, (0, own[1].shape[2]), value=True)[:, None, None, :]
        mixed = F.scaled_dot_product_attention(own[0], key, value, attn_mask=mask)
        if out is None:
            return mixed
        out[:, heads] = mixed
    assert out is not None
    return out
