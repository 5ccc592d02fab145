"""What the benchmark is: how many tasks, how long, which budgets, and how γ is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from statebridge.prune import Reindex

#: First candidate scene; training, validation and judging of the small world use none from here on.
FIRST_SEED = 2**31 + 30_000_000


@dataclass(frozen=True)
class BenchmarkConfig:
    """All choices of a run.

    Attributes
    ----------
    validation, test
        Tasks for choosing, and tasks that are reported; no scene is in both.
    calibration
        Validation tasks on which thresholds are brought to a budget.
    context
        Frames that are observed; 240 are a minute at 4 frames a second.
    batch
        Tasks at a time.
    sink, window
        Chunks that every policy leaves whole.
    ratios
        Budgets: the share that is kept of what leaves the window.
    main
        The budget of the headline comparison, one of `ratios`.
    share
        Share of dynamic heads of the head-specific variant.
    recent, span
        Re-indexing, in frames.
    gamma_slack
        γ is the largest of DeCoPrune's thresholds whose error in the target box is at most this many times that of
        full KV.
    speed_rows, speed_repeats
        Rows that continue together when speed is measured, and timed repeats.
    strips
        Tasks whose frames are kept for pictures.
    probe_step, seed
        Step of the schedule at which discrepancies are read; seed of the noise.
    """

    validation: int = 64
    test: int = 128
    calibration: int = 32
    context: int = 240
    batch: int = 64
    sink: int = 1
    window: int = 4
    ratios: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4)
    main: float = 0.1
    share: float = 0.5
    recent: float = 16.0
    span: float = 80.0
    gamma_slack: float = 1.1
    speed_rows: tuple[int, ...] = (1, 32)
    speed_repeats: int = 10
    strips: int = 6
    probe_step: int = 2
    seed: int = 0

    @property
    def reindex(self) -> Reindex:
        """The re-indexing that is tried."""
        return Reindex(self.recent, self.span)


#: A run on a CPU in about a minute: shows that everything works, and measures nothing.
SMOKE = BenchmarkConfig(
    validation=2,
    test=4,
    calibration=2,
    context=48,
    batch=4,
    window=2,
    ratios=(0.1, 0.4),
    recent=4.0,
    span=24.0,
    speed_rows=(1,),
    speed_repeats=1,
    strips=2,
)
