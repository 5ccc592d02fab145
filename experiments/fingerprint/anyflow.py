"""A causal rollout of a video-diffusion transformer of diffusers as a session, with nothing kept outside its buffers.

Chunks of latent frames are denoised one after the other with the cached keys and values of the clean chunks before
them; a clean pass at noise 0 writes the cache. Flow matching on the schedule sigma, ending at 0:

    deterministic   x ← x + (sigma' − sigma) v(x, sigma)
    stochastic      x ← (1 − sigma') x̂0 + sigma' · new noise,   x̂0 = x − sigma v(x, sigma)

The first noise of every chunk is drawn ahead; new noise comes from the generator as it is needed. Weights are random:
what is measured is what the runtime holds, not what it shows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from diffusers import AnyFlowFARTransformer3DModel

from statebridge.sessions import Buffer, BufferKind
from statebridge.sessions.adapters import buffer_tensor, tensor_buffer
from statebridge.sessions.fingerprint import Derivation

CHUNKS, FRAMES, CHANNELS, SIDE = 8, 2, 4, 8  # chunks in all, latent frames a chunk, latent channels and side
SIGMAS = (0.999, 0.957, 0.899, 0.702, 0.0)
LAYERS, HEADS, DIM = 2, 2, 12
FRAME_TOKENS = (SIDE // 2) ** 2


def tiny_model(seed: int = 0) -> AnyFlowFARTransformer3DModel:
    """A random model of 22,400 parameters or so whose chunks all stay at full resolution."""
    torch.manual_seed(seed)
    return AnyFlowFARTransformer3DModel(
        num_attention_heads=HEADS,
        attention_head_dim=DIM,
        in_channels=CHANNELS,
        out_channels=CHANNELS,
        text_dim=16,
        freq_dim=16,
        ffn_dim=32,
        num_layers=LAYERS,
        full_chunk_limit=CHUNKS + 1,
        rope_max_seq_len=64,
        chunk_partition=(FRAMES,) * CHUNKS,
    ).eval()


class Rollout:
    """A rollout in progress.

    Parameters
    ----------
    model
        From `tiny_model`.
    stochastic
        Draw new noise between the steps of the sampler.

    Attributes
    ----------
    latents
        Clean latents of the chunks so far [1, F, C, H, W].
    kv
        Per layer, keys before rotation and values of the clean chunks [2, 1, H, T, D].
    noise
        First noise of all chunks, drawn ahead [1, F, C, H, W].
    clock
        Chunks done.
    """

    def __init__(self, model: AnyFlowFARTransformer3DModel, stochastic: bool) -> None:
        self.model, self.stochastic = model, stochastic
        self.generator = torch.Generator().manual_seed(12345)
        self.prompt = torch.zeros(1, 3, 16)
        self.noise = self._draw(0)
        self.latents = self._draw(0)
        self.kv = [torch.zeros(2, 1, HEADS, 0, DIM) for _ in range(LAYERS)]
        self.clock = 0

    def begin(self, seed: int) -> None:
        """Draw what this session keeps, and its random state."""
        self.generator.manual_seed(seed)
        self.prompt = torch.randn(1, 3, 16, generator=self.generator)
        self.noise = self._draw(CHUNKS * FRAMES)

    @torch.no_grad()
    def step(self, chunks: int = 1) -> torch.Tensor:
        """Denoise the next chunks and write their keys and values; the new latents [1, F, C, H, W]."""
        first = self.clock * FRAMES
        for _ in range(chunks):
            x = self.noise[:, self.clock * FRAMES : (self.clock + 1) * FRAMES]
            for sigma, after in itertools.pairwise(SIGMAS):
                velocity = self._velocity(x, sigma, after)
                if self.stochastic and after > 0:
                    x = (1 - after) * (x - sigma * velocity) + after * self._draw(FRAMES)
                else:
                    x = x + (after - sigma) * velocity
            self.latents = torch.cat((self.latents, x), dim=1)
            self.clock += 1
            self.kv = self._encode(self.latents)
        return self.latents[:, first:]

    def buffers(self) -> Iterator[Buffer]:
        """Everything that the next chunk depends on."""
        yield tensor_buffer("prompt", BufferKind.SETTINGS, self.prompt)
        yield tensor_buffer("latents", BufferKind.LATENT, self.latents, grows=1)
        for index, kv in enumerate(self.kv):
            again = ("latents", "prompt", "clock")
            yield tensor_buffer(
                f"kv.{index}", BufferKind.KV, kv, grows=3, derivable_from=again, cost=self.clock
            )
        yield tensor_buffer("noise", BufferKind.RANDOM, self.noise)
        yield Buffer.of("clock", BufferKind.CLOCK, np.int64(self.clock))
        yield tensor_buffer("generator", BufferKind.RANDOM, self.generator.get_state())

    def load(self, buffers: Iterable[Buffer]) -> None:
        """Take back what is given; the generator's state comes last in what is given."""
        named = {buffer.name: buffer_tensor(buffer) for buffer in buffers}
        self.prompt, self.latents, self.noise = (named[name] for name in ("prompt", "latents", "noise"))
        self.kv = [named[f"kv.{index}"] for index in range(LAYERS)]
        self.clock = int(named["clock"])
        self.generator.set_state(named["generator"])

    def derivations(self) -> Iterator[Derivation]:
        """Keys and values come from a clean pass over the clean latents."""
        yield Derivation(("kv.*",), ("latents", "prompt"), self._encode_again)

    def _encode_again(self, sources: Mapping[str, Buffer]) -> Iterator[Buffer]:
        self.prompt = buffer_tensor(sources["prompt"])
        for index, kv in enumerate(self._encode(buffer_tensor(sources["latents"]))):
            yield tensor_buffer(f"kv.{index}", BufferKind.KV, kv, grows=3)

    def _draw(self, frames: int) -> torch.Tensor:
        return torch.randn(1, frames, CHANNELS, SIDE, SIDE, generator=self.generator)

    def _velocity(self, x: torch.Tensor, sigma: float, after: float) -> torch.Tensor:
        cache = [{"full_cache": kv, "compressed_cache": kv[..., :0, :]} for kv in self.kv]
        flag = {"num_cached_chunks": self.clock, "is_cache_step": False}
        output, _ = self.model(
            hidden_states=x,
            timestep=torch.full((1, FRAMES), 1000 * sigma),
            r_timestep=torch.full((1, FRAMES), 1000 * after),
            encoder_hidden_states=self.prompt,
            chunk_partition=[FRAMES] * (self.clock + 1),
            kv_cache=cache,
            kv_cache_flag=flag,
            return_dict=False,
        )
        return output

    @torch.no_grad()
    def _encode(self, latents: torch.Tensor) -> list[torch.Tensor]:
        frames = latents.shape[1]
        kv = [torch.zeros(2, 1, HEADS, frames * FRAME_TOKENS, DIM) for _ in range(LAYERS)]
        partition = [FRAMES] * (frames // FRAMES)
        clean = torch.zeros(1, frames)
        self.model(
            hidden_states=latents,
            timestep=clean,
            r_timestep=clean,
            encoder_hidden_states=self.prompt,
            chunk_partition=partition,
            attention_mask=self.model.build_attention_mask(
                # by name, because it asks for a GPU driver otherwise
                chunk_partition=partition,
                height=SIDE,
                width=SIDE,
                device=torch.device("cpu"),
                mode="cache",
            ),
            kv_cache=[{"full_cache": each, "compressed_cache": each[..., :0, :]} for each in kv],
            kv_cache_flag={"num_cached_chunks": 0, "is_cache_step": True},
        )
        return kv
