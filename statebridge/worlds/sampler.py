"""The few-step sampler: from noise to a clean chunk in four predictions, each of which is kept.

    x_σ = (1 - σ) x0 + σ noise,     σ from (999, 957, 899, 702) / 1000, then 0

Deterministic (Euler): the noise implied by a prediction is carried to the next level. Stochastic: fresh noise is
drawn at every level but the last. The trajectory holds every x̂0, so that a score which compares an early
prediction with the result costs no further call. After the chunk is clean, one pass at σ = 0 writes its keys.

Knows the model's call and a cache; which history is kept is the caller's choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from statebridge.errors import ConfigError
from statebridge.worlds.cache import ChunkKV, History, HistoryCache
from statebridge.worlds.conditioning import Conditioning
from statebridge.worlds.model import WorldModel

Tensor = torch.Tensor

SCHEDULE = (0.999, 0.957, 0.899, 0.702)
PROBE = 2  # index of the prediction that pruning compares with the result


@dataclass(frozen=True)
class Trajectory:
    """How a chunk became clean.

    Attributes
    ----------
    sigmas
        Noise level before each prediction.
    predictions
        x̂0 of each step, float32 [B, F, 3, size, size], clamped to [-1, 1]; the last one is the result.
    """

    sigmas: tuple[float, ...]
    predictions: tuple[Tensor, ...]

    @property
    def final(self) -> Tensor:
        """The clean chunk."""
        return self.predictions[-1]

    def probe(self, step: int = PROBE) -> Tensor:
        """The prediction of one step.

        Raises
        ------
        ConfigError
            When the schedule has no such step, or it is the last one, which is the result itself.
        """
        if not 0 <= step < len(self.predictions) - 1:
            raise ConfigError(
                f"Probe step {step} lies outside the schedule; choose 0 to {len(self.predictions) - 2}."
            )
        return self.predictions[step]


@dataclass(frozen=True)
class Sampler:
    """Turns noise into clean chunks.

    Attributes
    ----------
    sigmas
        Falling noise levels in (0, 1].
    stochastic
        Draw fresh noise at every level, from the generator that is given.

    Raises
    ------
    ConfigError
        When the levels do not fall within (0, 1].
    """

    sigmas: tuple[float, ...] = SCHEDULE
    stochastic: bool = False

    def __post_init__(self) -> None:
        falling = all(a > b for a, b in zip(self.sigmas, self.sigmas[1:], strict=False))
        if not self.sigmas or not falling or not 0 < self.sigmas[-1] <= self.sigmas[0] <= 1:
            raise ConfigError(
                f"The noise levels {self.sigmas} do not fall within (0, 1]; give such a schedule."
            )

    @torch.no_grad()
    def sample(
        self, model: WorldModel, conditioning: Conditioning, history: History, generator: torch.Generator
    ) -> Trajectory:
        """Denoise the chunk that the conditioning describes.

        Parameters
        ----------
        generator
            Where noise comes from; a CPU generator gives the same noise whatever the model's device.
        """
        noise = draw_noise(model, conditioning, generator)
        x, predictions = (
            self.sigmas[0] * noise,
            [],
        )  # x0 is unknown and its share at the first level is nearly 0
        B = noise.shape[0]
        for sigma, after in zip(self.sigmas, (*self.sigmas[1:], 0.0), strict=True):
            level = torch.full((B,), sigma, device=x.device)
            x0 = model(x, level, conditioning, history)[0].clamp(-1, 1)
            predictions.append(x0)
            if after:
                carried = (
                    draw_noise(model, conditioning, generator)
                    if self.stochastic
                    else (x - (1 - sigma) * x0) / sigma
                )
                x = (1 - after) * x0 + after * carried
        return Trajectory(self.sigmas, tuple(predictions))


def draw_noise(model: WorldModel, conditioning: Conditioning, generator: torch.Generator) -> Tensor:
    """Normal noise for a chunk, float32 [B, F, 3, size, size] on the model's device."""
    size = model.config.camera.size
    shape = (*conditioning.actions.shape, 3, size, size)
    return torch.randn(shape, generator=generator, device=generator.device).to(model.device)


@torch.no_grad()
def write_chunk(
    model: WorldModel, frames: Tensor, conditioning: Conditioning, cache: HistoryCache
) -> HistoryCache:
    """Append a clean chunk to a history by a pass at σ = 0.

    Parameters
    ----------
    frames
        Clean frames [B, F, 3, size, size] in [-1, 1], generated or observed.
    """
    return cache.append(
        encode_chunk(model, frames, conditioning, cache.read(model.config.rotary), cache.next_chunk)
    )


@torch.no_grad()
def encode_chunk(
    model: WorldModel, frames: Tensor, conditioning: Conditioning, history: History, number: int
) -> ChunkKV:
    """Keys and values of a clean chunk, which may see a history other than the one it is appended to."""
    clean = torch.zeros(frames.shape[0], device=frames.device)
    written: ChunkKV = model(frames, clean, conditioning, history, number)[1]
    return written


@torch.no_grad()
def predict_at(
    model: WorldModel,
    frames: Tensor,
    sigma: float,
    conditioning: Conditioning,
    history: History,
    noise: Tensor,
) -> Tensor:
    """Noise observed clean frames to a level and predict them again: the probe of content without a trajectory.

    Returns
    -------
    x0
        Prediction, float32 [B, F, 3, size, size], clamped to [-1, 1].
    """
    level = torch.full((frames.shape[0],), sigma, device=frames.device)
    x0: Tensor = model((1 - sigma) * frames + sigma * noise, level, conditioning, history)[0]
    return x0.clamp(-1, 1)
