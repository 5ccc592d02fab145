"""What a training run is made of, as frozen dataclasses read from a YAML file.

A run is a shape, a list of phases (tokens, sequence length, sequences a step) and one learning-rate
schedule over all their tokens. Nothing here depends on the number of processes or on the clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3.5 text model. The defaults of the state's geometry hold for both models."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int = 8192
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 8
    linear_key_head_dim: int = 32
    linear_value_head_dim: int = 32
    linear_conv_kernel_dim: int = 4
    max_position_embeddings: int = 32768
    rope_theta: float = 1e6


@dataclass(frozen=True)
class Phase:
    """``tokens`` tokens in steps of ``sequences`` sequences (over all processes) of ``length`` tokens."""

    tokens: int
    length: int
    sequences: int

    @property
    def steps(self) -> int:
        """Optimizer steps of the phase (rounded down, at least one)."""
        return max(1, self.tokens // (self.length * self.sequences))


@dataclass(frozen=True)
class TrainConfig:
    """One training run.

    ``lr`` is the peak, reached after ``warmup_tokens``; from there it stays until ``decay_from`` (a share
    of all tokens) and falls as a half cosine to ``final_lr`` times the peak. ``recall_share`` of the
    sequences are recall documents, whose answer tokens weigh ``answer_weight`` in the loss.
    """

    shape: Shape
    phases: tuple[Phase, ...]
    lr: float
    seed: int = 0
    warmup_tokens: int = 20_000_000
    decay_from: float = 0.0
    final_lr: float = 0.02
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0
    recall_share: float = 0.12
    answer_weight: float = 5.0
    log_every: int = 50
    save_every: int = 1000

    @classmethod
    def from_yaml(cls, path: Path) -> TrainConfig:
        """Read a config; an unknown key raises TypeError."""
        raw = yaml.safe_load(path.read_text())
        shape, phases = Shape(**raw.pop("shape")), tuple(Phase(**phase) for phase in raw.pop("phases"))
        return cls(shape=shape, phases=phases, **raw)

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return sum(phase.steps for phase in self.phases)

    @property
    def tokens(self) -> int:
        """Tokens in all (whole steps)."""
        return sum(phase.steps * phase.length * phase.sequences for phase in self.phases)
