"""What a training run of the small world is: sizes, schedule, and how contexts are thinned.

A run is a function of this config and the number of steps. Sequences are chunks picked from longer walks, so
that a model sees time spans well beyond the chunks it can afford.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from statebridge.worlds import WorldConfig


@dataclass(frozen=True)
class Phase:
    """A stretch of the run with one sequence length.

    Attributes
    ----------
    share
        Share of all steps.
    chunks, sequences
        Chunks of a sequence, and sequences of a batch.
    """

    share: float
    chunks: int
    sequences: int


@dataclass(frozen=True)
class TrainConfig:
    """All choices of a run.

    Attributes
    ----------
    phases
        In order; their shares add up to 1.
    walk_chunks
        Chunks of the walk from which a sequence is picked.
    lr, warmup, final_lr
        Peak learning rate, steps of linear warm-up, and the last rate as a share of the peak. Cosine between.
    weight_decay, ema
        Of matrices; decay of the average of the weights that is shipped.
    schedule_share
        Share of noise levels taken from the sampler's schedule; the others are uniform.
    context_noise
        Largest noise level on clean chunks, so that small faults of generated history do not throw the model.
    seed
        Of everything random.
    """

    model: WorldConfig = field(default_factory=WorldConfig)
    phases: tuple[Phase, ...] = (Phase(0.7, 20, 16), Phase(0.3, 40, 8))
    walk_chunks: int = 80
    lr: float = 2e-3
    warmup: int = 150
    final_lr: float = 0.02
    weight_decay: float = 0.05
    ema: float = 0.998
    schedule_share: float = 0.8
    context_noise: float = 0.1
    seed: int = 0

    def phase(self, step: int, steps: int) -> Phase:
        """The phase that a step belongs to."""
        done = 0.0
        for phase in self.phases:
            done += phase.share
            if step < round(done * steps):
                return phase
        return self.phases[-1]


#: Settings of a run on a CPU in a minute: shows that the loop works, learns next to nothing.
TINY = TrainConfig(
    model=WorldConfig(width=64, layers=2, heads=1),
    phases=(Phase(0.7, 8, 2), Phase(0.3, 10, 1)),
    walk_chunks=12,
    warmup=2,
)
