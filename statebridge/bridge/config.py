"""Settings of the fits. Defaults are the published protocol of the 4B to 9B experiments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from statebridge.errors import ConfigError
from statebridge.select import GLOBAL_PLANS, Plan
from statebridge.state import COMPONENTS, Component

PLANS = tuple(str(plan) for plan in GLOBAL_PLANS)


@dataclass(frozen=True)
class DocumentsConfig:
    """Where documents come from; anything that the `datasets` library reads.

    Attributes
    ----------
    source
        A text, .jsonl, .json or .parquet file, a folder of such files, or the name of a dataset on the hub,
        which is streamed; or, for trials, "installed:20000" for pieces of 20,000 characters of prose that comes
        with Python, as many as are wanted.
    name, split, revision
        Config name, split and revision of a hub dataset.
    text_field, id_field
        Columns of the text and of the identifier; without an identifier, the file name and row number.
    window
        "start" takes the first tokens of a document, "random" a seeded window.
    """

    source: str = "HuggingFaceFW/fineweb-edu"
    name: str | None = None
    split: str = "train"
    revision: str | None = None
    text_field: str = "text"
    id_field: str | None = None
    window: Literal["start", "random"] = "start"


@dataclass(frozen=True)
class FitConfig:
    """Settings of `fit_bridge`.

    Attributes
    ----------
    documents
        Where documents come from.
    fit_documents, validation_documents
        Numbers of documents; the validation ones come first in the stream, the fit ones after them.
    checkpoints
        Prefix lengths in tokens at which R and C are captured, each by its own one-shot prefill; K and V come
        from the longest.
    batch_size
        Documents per forward pass.
    ridge_alphas, bilinear_alphas
        Regularisation grids, relative to the mean variance of the inputs.
    bilinear_iterations
        Most sweeps of the alternating R fit.
    plan
        Translate or copy each of K, R, C, as `Plan` writes it: "TDD", or by layers "0-3:TDD,4-7:DDD".
    seed
        Of the document windows.
    """

    documents: DocumentsConfig = field(default_factory=DocumentsConfig)
    fit_documents: int = 128
    validation_documents: int = 32
    checkpoints: tuple[int, ...] = (128, 256, 384, 512, 640, 768, 896, 1024)
    batch_size: int = 8
    ridge_alphas: tuple[float, ...] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    bilinear_alphas: tuple[float, ...] = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    bilinear_iterations: int = 10
    plan: str = "TDD"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what could only fail after the models have read everything."""
        for name in ("fit_documents", "validation_documents"):
            if getattr(self, name) < 2:
                raise ConfigError(f"{name} must be at least 2, found {getattr(self, name)}.")
        if self.batch_size < 1 or self.bilinear_iterations < 1:
            raise ConfigError("batch_size and bilinear_iterations must be at least 1.")
        lengths = self.checkpoints
        if not lengths or min(lengths) < 1 or len(set(lengths)) != len(lengths):
            raise ConfigError(f"checkpoints must be different positive lengths, found {list(lengths)}.")
        # the alternating fit of R has no minimum-norm solution to fall back on
        for name, least in (("ridge_alphas", 0.0), ("bilinear_alphas", 5e-324)):
            grid = getattr(self, name)
            if not grid or not all(least <= alpha < float("inf") for alpha in grid):
                kind = "positive" if least else "non-negative"
                raise ConfigError(f"{name} must hold {kind} finite numbers, found {list(grid)}.")
        Plan.parse(self.plan)


@dataclass(frozen=True)
class CalibrateConfig:
    """Settings of `fit_calibrator`.

    At the size of 4B and 9B one document's state of 4,096 tokens takes 186 MB wherever it is kept. For each of
    `micro_batch` documents it is in memory with its calibrated copy and what the backward pass keeps: plan for
    about 1 GB of accelerator memory per document of a micro-batch beside the receiver. The states of all documents
    come on top with `states` "device": 30 GB for 160 documents, in every process.

    Attributes
    ----------
    prefix
        Tokens L that the source reads.
    positions
        Output positions of the loss: the bridge token and `positions` - 1 teacher-forced inputs after it.
    components
        Components that are calibrated.
    ranks, penalties
        The grid: every rank with every weight of the identity penalty.
    learning_rate
        Of Adam.
    batch_size
        Documents per step, all processes together.
    micro_batch
        Documents per forward pass.
    max_steps
        Most steps per grid point.
    evaluate_every, patience
        Steps between evaluations on the validation documents, and how many of them may pass without a new
        best KL before a grid point ends.
    states
        "disk" keeps every document's state under the plan in the work folder, "device" in the memory of the device
        that trains, where no step waits for a file; "recompute" keeps none and lets the source read its documents
        again whenever they are needed. Models that take turns need "disk".
    seed
        Of the fixed bases and the order of documents.
    """

    prefix: int = 4096
    positions: int = 9
    components: tuple[Component, ...] = COMPONENTS
    ranks: tuple[int, ...] = (2, 4)
    penalties: tuple[float, ...] = (0.001, 0.01, 0.1)
    learning_rate: float = 1e-3
    batch_size: int = 8
    micro_batch: int = 1
    max_steps: int = 400
    evaluate_every: int = 20
    patience: int = 4
    states: Literal["disk", "device", "recompute"] = "disk"
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what could only fail after the models have read everything."""
        for name in (
            "prefix",
            "positions",
            "batch_size",
            "micro_batch",
            "max_steps",
            "evaluate_every",
            "patience",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, found {getattr(self, name)}.")
        if not self.ranks or min(self.ranks) < 1:
            raise ConfigError(f"ranks must hold positive numbers, found {list(self.ranks)}.")
        if not self.penalties or not all(0 <= weight < float("inf") for weight in self.penalties):
            raise ConfigError(
                f"penalties must hold non-negative finite numbers, found {list(self.penalties)}."
            )
        if not 0 < self.learning_rate < float("inf"):
            raise ConfigError(f"learning_rate must be a positive finite number, found {self.learning_rate}.")
        if not self.components or not set(self.components) <= set(COMPONENTS):
            raise ConfigError(f"components must be some of {', '.join(COMPONENTS)}, found {self.components}.")
        if self.states not in ("disk", "device", "recompute"):
            raise ConfigError(f'states must be "disk", "device" or "recompute", found {self.states!r}.')

    @property
    def needs_both_models(self) -> bool:
        """Whether the source may have to read in the middle of the training, so that models cannot take turns."""
        return self.states != "disk"
