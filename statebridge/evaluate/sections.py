"""The tables of a run beside its scores: recall, free-running generation, residuals of the calibrator.

A section is a name, its batches and what one batch gives; the run stores each batch when it is done. Sections
that the settings leave off do not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa

from statebridge.bridge import Bridge, ModelPair, TokenWindow, load_documents
from statebridge.errors import ConfigError
from statebridge.evaluate.arms import Protocol, batches
from statebridge.evaluate.config import EvaluateConfig
from statebridge.evaluate.generation import generation_table
from statebridge.evaluate.recall import RecallItem, RecallTask
from statebridge.evaluate.recall_score import answer
from statebridge.evaluate.residuals import residual_table

#: Documents whose residuals are measured; they hardly differ between documents.
RESIDUAL_DOCUMENTS = 8


@dataclass(frozen=True)
class Section:
    """One table of a run.

    Attributes
    ----------
    name
        Of its file, without the ending.
    jobs
        First and last (exclusive) row of each batch.
    compute
        The rows of one batch.
    """

    name: str
    jobs: list[tuple[int, int]]
    compute: Callable[[int, int], pa.Table]


def further_sections(
    pair: ModelPair, bridge: Bridge, config: EvaluateConfig, windows: Sequence[TokenWindow]
) -> list[Section]:
    """Every section that the settings and the bridge ask for, besides the scores.

    Raises
    ------
    ConfigError
        When a fact of the recall task does not fit at its depth.
    """
    found = []
    if config.recall.items_per_depth:
        found.append(_recall(pair, bridge, config, windows))
    if config.generation.documents:
        jobs = batches(min(config.generation.documents, len(windows)), config.batch_size)

        def continue_freely(first: int, last: int) -> pa.Table:
            protocol = Protocol(config.prefix, config.targets)
            return generation_table(
                pair, windows[first:last], protocol, config.generation, bridge=bridge, seed=config.seed
            )

        found.append(Section("generation", jobs, continue_freely))
    if (calibrator := bridge.calibrator) is not None:
        jobs = batches(min(RESIDUAL_DOCUMENTS, len(windows)), config.batch_size)

        def measure(first: int, last: int) -> pa.Table:
            batch = windows[first:last]
            return residual_table(pair, batch, config.prefix, bridge=bridge, calibrator=calibrator)

        found.append(Section("residuals", jobs, measure))
    return found


def _recall(
    pair: ModelPair, bridge: Bridge, config: EvaluateConfig, windows: Sequence[TokenWindow]
) -> Section:
    items = _items(pair, config, windows)

    def ask(first: int, last: int) -> pa.Table:
        rows = items[first:last]
        hits = answer(pair, rows, bridge=bridge)
        return pa.Table.from_pylist(
            [
                {"arm": arm, "depth": row.depth, "item": first + i, "hit": hit}
                for arm, found in hits.items()
                for i, (row, hit) in enumerate(zip(rows, found, strict=True))
            ]
        )

    return Section("recall", batches(len(items), config.batch_size), ask)


def _items(pair: ModelPair, config: EvaluateConfig, windows: Sequence[TokenWindow]) -> list[RecallItem]:
    recall = config.recall
    if recall.filler is None:
        filler = [pair.tokenizer.decode(window.ids) for window in windows]
    else:
        filler = [document.text for document in islice(load_documents(recall.filler), config.count)]
    task = RecallTask(
        tokenizer=pair.tokenizer,
        filler=filler,
        length=config.prefix,
        depths=recall.depths,
        items_per_depth=recall.items_per_depth,
        distractors=recall.distractors,
        seed=config.seed,
    )
    try:
        return list(task.items())
    except ValueError as error:
        raise ConfigError(f"recall.depths: {error}; give other depths or a longer prefix.") from error
