"""AnyFlow's causal transformer (diffusers), pruned.

The model keeps raw keys and rotates them when it reads them. Its own read path pads queries, keys and values
with zeros to a multiple of 128 queries and gives no mask, so that zero keys take part in the softmax; they are
part of what the model was trained with, and this adapter puts them there as well. Its own cache pass masks the
padding and reads the whole prefix again after every chunk; here the clean pass reads the new chunk alone against
the history, which is the same sum in another order, and the only way once something has been pruned.

Old chunks stay at full resolution: the model may not reach `full_chunk_limit`, from where on it would read them
through its compressed patches. Source: AnyFlow, arXiv 2605.13724; FAR, arXiv 2503.19325.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from diffusers import AnyFlowFARTransformer3DModel, FlowMapEulerDiscreteScheduler
from diffusers.models.transformers.transformer_anyflow_far import apply_rotary_emb
from torch import Tensor

from statebridge.errors import PruneError
from statebridge.prune.adapters.anyflow_attention import LayerPass, PrunedAttention
from statebridge.prune.backbone import Clock, Geometry, Raggedness
from statebridge.prune.rotary import Rotation, keys_at
from statebridge.worlds.cache import ChunkKV, History, HistoryCache, RotatedSlots
from statebridge.worlds.sampler import SCHEDULE, Trajectory

#: The published schedule, in the scheduler's units.
TIMESTEPS = tuple(1000 * sigma for sigma in SCHEDULE)


class AnyFlow:
    """An `AnyFlowFARTransformer3DModel` as a backbone. The condition of a chunk is its text embedding [B, L, d].

    Parameters
    ----------
    model
        The transformer; its self-attention processors are replaced by ones that behave as before without a
        pruned history.
    height, width
        Of a latent frame.
    frames
        Latent frames of a chunk.
    timesteps
        Sampling schedule in the scheduler's units of 1000.
    rotation
        Cache keys raw, as the model does, or rotated where they were written, as other runtimes do.

    Raises
    ------
    PruneError
        When the latent size is not a whole number of patches.
    """

    raggedness = Raggedness.HEAD_GROUPS

    def __init__(
        self,
        model: AnyFlowFARTransformer3DModel,
        *,
        height: int,
        width: int,
        frames: int,
        timesteps: Sequence[float] = TIMESTEPS,
        rotation: Rotation = Rotation.RAW,
    ) -> None:
        config = model.config
        patch = tuple(config.patch_size)
        if height % patch[1] or width % patch[2] or patch[0] != 1:
            raise PruneError(f"Latent frames of {height} × {width} are no whole number of patches {patch}.")
        self.model, self.height, self.width, self.frames = model, height, width, frames
        self.grid = (height // patch[1], width // patch[2])
        self.rotation = rotation
        self.geometry = Geometry(
            config.num_layers,
            config.num_attention_heads,
            config.attention_head_dim,
            self.grid[0] * self.grid[1],
        )
        self.scheduler = FlowMapEulerDiscreteScheduler()
        self.scheduler.set_timesteps(timesteps=list(timesteps), device=self.device)
        self.schedule = tuple(self.scheduler.sigmas[:-1].tolist())
        for block in model.blocks:
            block.attn1.set_processor(PrunedAttention())

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return torch.device(self.model.device)

    def empty_cache(self, batch: int) -> HistoryCache:
        """Return a history of nothing."""
        g = self.geometry
        return HistoryCache.empty(g.layers, g.heads, g.head_dim, batch, self.model.dtype, self.device)

    def read(self, cache: HistoryCache, coordinates: Sequence[Tensor | None] | None) -> History:
        """Rotate the keys of each group."""
        moved = [None] * len(cache.groups) if coordinates is None else coordinates
        return tuple(
            RotatedSlots(
                slots.heads,
                tuple(
                    keys_at(key, self.rotation, slots.coordinates, where, self._rotate) for key in slots.keys
                ),
                slots.values,
                slots.valid if slots.padded else None,
            )
            for slots, where in zip(cache.groups, moved, strict=True)
        )

    def sample(
        self, history: History, clock: Clock, condition: Tensor, generator: torch.Generator
    ) -> Trajectory:
        """Sample a chunk [B, F, C, H, W]; x̂0 = x − σ u, u being the mean velocity to the next level."""
        x, predictions = self._noise(condition, generator), []
        for step, t in enumerate(self.scheduler.timesteps):
            velocity = self._velocity(history, clock, x, step, condition)
            predictions.append(self._to_zero(velocity, t, x))
            x = self.scheduler.step(velocity, t, x, return_dict=False)[0]
        return Trajectory(self.schedule, tuple(predictions))

    def probe(
        self,
        history: History,
        clock: Clock,
        clean: Tensor,
        step: int,
        condition: Tensor,
        generator: torch.Generator,
    ) -> Tensor:
        """Noise an observed chunk to a step and predict it again."""
        t = self.scheduler.timesteps[step]
        noisy = self.scheduler.scale_noise(clean, t, self._noise(condition, generator))
        return self._to_zero(self._velocity(history, clock, noisy, step, condition), t, noisy)

    def write(self, history: History, clock: Clock, clean: Tensor, condition: Tensor) -> ChunkKV:
        """Read the clean chunk at timestep 0."""
        passes = self._passes(history, padded=False)
        self._run(passes, clock, clean, clean.new_zeros(()), clean.new_zeros(()), condition)
        coordinates = self._coordinates(clock).to(self.device)  # [N, 3]
        keys = tuple(_set(layer.key) for layer in passes)
        if self.rotation is Rotation.WRITTEN:
            keys = tuple(self._rotate(key, coordinates[None]) for key in keys)
        frame = torch.arange(self.frames, device=self.device).repeat_interleave(self.geometry.frame_tokens)
        return ChunkKV(
            keys,
            tuple(_set(layer.value) for layer in passes),
            coordinates.expand(len(clean), -1, -1),
            frame + int(clock.frame),
            clock.chunk,
            clock.frame + self.frames,
        )

    def tokens(self, x: Tensor) -> Tensor:
        """Return patch values [B, N, channels of a patch] of a chunk [B, F, C, H, W]."""
        _, ph, pw = self.model.config.patch_size
        frames, channels = x.shape[1:3]
        rows, columns = self.grid
        tiles = x.reshape(-1, frames, channels, rows, ph, columns, pw)
        return tiles.permute(0, 1, 3, 5, 2, 4, 6).reshape(len(x), frames * rows * columns, -1)

    def attention_mass(
        self, history: History, clock: Clock, clean: Tensor, condition: Tensor, chosen: Tensor
    ) -> Tensor:
        """Return the attention [layers, heads] of a clean pass on the chosen slots."""
        passes = self._passes(history, padded=False, chosen=chosen)
        self._run(passes, clock, clean, clean.new_zeros(()), clean.new_zeros(()), condition)
        return torch.stack([_set(layer.mass) for layer in passes])

    def _passes(self, history: History, padded: bool, chosen: Tensor | None = None) -> list[LayerPass]:
        return [LayerPass(layer, history, padded, chosen) for layer in range(self.geometry.layers)]

    def _velocity(self, history: History, clock: Clock, x: Tensor, step: int, condition: Tensor) -> Tensor:
        following = self.scheduler.sigmas[step + 1] * self.scheduler.config.num_train_timesteps
        passes = self._passes(history, padded=True)
        return self._run(passes, clock, x, self.scheduler.timesteps[step], following, condition)

    def _run(
        self, passes: list[LayerPass], clock: Clock, x: Tensor, t: Tensor, r: Tensor, condition: Tensor
    ) -> Tensor:
        """One model call over one chunk at its absolute time."""
        limit = self.model.config.full_chunk_limit
        if clock.chunk + 1 > limit:
            raise PruneError(
                f"Chunk {clock.chunk} is beyond full_chunk_limit = {limit}, where AnyFlow compresses old chunks; "
                "load the model with full_chunk_limit of at least the number of chunks."
            )
        start, shape = int(clock.frame), x.shape[:2]
        out: Tensor = self.model(
            hidden_states=x,
            timestep=t.expand(shape),
            r_timestep=r.expand(shape),
            encoder_hidden_states=condition,
            # the model takes times from the sum of the partition: all frames before the chunk count as one
            chunk_partition=[start, shape[1]] if start else [shape[1]],
            kv_cache=passes,
            kv_cache_flag={"is_cache_step": False, "num_cached_chunks": int(start > 0)},
            return_dict=False,
        )[0]
        return out

    def _to_zero(self, velocity: Tensor, t: Tensor, x: Tensor) -> Tensor:
        out: Tensor = self.scheduler.step(velocity, t, x, self.scheduler.sigmas[-1], return_dict=False)[0]
        return out

    def _noise(self, condition: Tensor, generator: torch.Generator) -> Tensor:
        shape = (len(condition), self.frames, self.model.config.in_channels, self.height, self.width)
        noise = torch.randn(shape, generator=generator, device=generator.device)
        return noise.to(self.device, self.model.dtype)

    def _coordinates(self, clock: Clock) -> Tensor:
        rows, columns = self.grid
        sides = (torch.arange(n, dtype=torch.float32) for n in (self.frames, rows, columns))
        t, h, w = (axis.flatten() for axis in torch.meshgrid(*sides, indexing="ij"))
        return torch.stack([t + clock.frame, h, w], -1)

    def _rotate(self, key: Tensor, coordinates: Tensor) -> Tensor:
        """Rotate [B, H, S, D] by coordinates [B, S, 3]; float64, the bits of the model's own for whole times."""
        frequencies = self._frequencies
        split = coordinates.double()
        angles = torch.cat([split[..., i : i + 1] * f for i, f in enumerate(frequencies)], -1)  # [B, S, D/2]
        turned: Tensor = apply_rotary_emb(key, torch.polar(torch.ones_like(angles), angles)[:, None])
        return turned

    @functools.cached_property
    def _frequencies(self) -> list[Tensor]:
        """Radians a step of the channel pairs of time, height and width, float64."""
        dim, theta = self.geometry.head_dim, self.model.rope.theta
        side = 2 * (dim // 6)
        return [
            1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float64, device=self.device)[: d // 2] / d)
            for d in (dim - 2 * side, side, side)
        ]


def _set(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # every pass runs every layer
    return tensor
