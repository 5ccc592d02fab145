"""A tiny AnyFlow with weights that matter, and the loop of its own pipeline, without text encoder and VAE."""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers import AnyFlowFARTransformer3DModel, FlowMapEulerDiscreteScheduler

FRAMES, SIDE, CHUNKS = 2, 8, 4
TOKENS = FRAMES * (SIDE // 2) ** 2


def tiny_model(full_chunk_limit: int = 8) -> AnyFlowFARTransformer3DModel:
    """Two layers of two heads; weights large enough that a lost token shows."""
    torch.manual_seed(0)
    model = AnyFlowFARTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
        rope_max_seq_len=64,
        full_chunk_limit=full_chunk_limit,
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("weight") and parameter.ndim > 1:
                parameter.normal_(std=1.3 * parameter[0].numel() ** -0.5)
    return model.requires_grad_(False)


def text(batch: int = 2) -> torch.Tensor:
    """Text embeddings [B, 3, 16]."""
    return torch.randn(batch, 3, 16, generator=torch.Generator().manual_seed(5))


def stock_cache(
    model: AnyFlowFARTransformer3DModel, batch: int, chunks: int
) -> dict[int, dict[str, torch.Tensor]]:
    """The pipeline's cache: one large zero tensor a layer."""
    c = model.config
    shape = (2, batch, c.num_attention_heads, chunks * TOKENS, c.attention_head_dim)
    return {
        layer: {"full_cache": torch.zeros(shape), "compressed_cache": torch.zeros(*shape[:3], 0, shape[4])}
        for layer in range(c.num_layers)
    }


def stock_velocity(
    model: Any,
    cache: Any,
    chunk: int,
    x: torch.Tensor,
    t: torch.Tensor,
    r: torch.Tensor,
    condition: torch.Tensor,
) -> torch.Tensor:
    """The pipeline's read step."""
    return model(
        hidden_states=x,
        timestep=t.expand(x.shape[:2]),
        r_timestep=r.expand(x.shape[:2]),
        encoder_hidden_states=condition,
        chunk_partition=[FRAMES] * (chunk + 1),
        kv_cache=cache,
        kv_cache_flag={"num_cached_chunks": chunk, "is_cache_step": False},
        return_dict=False,
    )[0]


def stock_write(model: Any, cache: Any, latents: torch.Tensor, condition: torch.Tensor) -> None:
    """The pipeline's cache step, over the whole prefix."""
    partition = [FRAMES] * (latents.shape[1] // FRAMES)
    zero = torch.zeros(latents.shape[:2], dtype=torch.int64)
    mask = model.build_attention_mask(
        chunk_partition=partition, height=SIDE, width=SIDE, device=torch.device("cpu"), mode="cache"
    )
    model(
        hidden_states=latents,
        timestep=zero,
        r_timestep=zero,
        encoder_hidden_states=condition,
        chunk_partition=partition,
        attention_mask=mask,
        kv_cache=cache,
        kv_cache_flag={"num_cached_chunks": len(partition) - 1, "is_cache_step": True},
        return_dict=False,
    )


@torch.no_grad()
def stock_rollout(
    model: Any, noises: list[torch.Tensor], condition: torch.Tensor, timesteps: tuple[float, ...]
) -> tuple[list[torch.Tensor], dict[int, dict[str, torch.Tensor]]]:
    """Chunks that the pipeline's loop makes from these noises, and its cache afterwards."""
    scheduler = FlowMapEulerDiscreteScheduler()
    cache = stock_cache(model, len(condition), len(noises))
    chunks: list[torch.Tensor] = []
    for chunk, noise in enumerate(noises):
        scheduler.set_timesteps(timesteps=list(timesteps))
        x = noise
        for step, t in enumerate(scheduler.timesteps):
            r = scheduler.sigmas[step + 1] * scheduler.config.num_train_timesteps
            velocity = stock_velocity(model, copy.copy(cache), chunk, x, t, r, condition)
            x = scheduler.step(velocity, t, x, return_dict=False)[0]
        chunks.append(x)
        stock_write(model, cache, torch.cat(chunks, 1), condition)
    return chunks, cache
