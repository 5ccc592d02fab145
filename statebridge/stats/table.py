"""One table of scores: documents by arms, aligned and complete.

Every statistic here is paired, so every arm must have every document once. This is where that is
checked; what follows can index by position. The table does not know what is scored (NLL in nats per
token, as a rule, where smaller is better).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from statebridge.errors import StatebridgeError
from statebridge.stats.bootstrap import Array


@dataclass(frozen=True, eq=False)
class ScoreTable:
    """Scores of documents under arms.

    Parameters
    ----------
    documents
        Ids of the N documents, each once.
    arms
        Names of the A arms, each once.
    scores
        `[N, A]`, float64, finite; the table keeps a read-only copy.

    Raises
    ------
    StatebridgeError
        Names the document or arm that is repeated, missing or not finite.
    """

    documents: tuple[str, ...]
    arms: tuple[str, ...]
    scores: Array

    def __post_init__(self) -> None:
        for kind, names in (("document", self.documents), ("arm", self.arms)):
            repeated = (
                {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()
            )
            if repeated:
                raise StatebridgeError(f"The {kind} {min(repeated)!r} is scored twice. Keep one of them.")
        scores = np.array(self.scores, dtype=np.float64)
        if scores.shape != (len(self.documents), len(self.arms)) or not scores.size:
            raise StatebridgeError(
                f"Scores of shape {scores.shape} do not fit {len(self.documents)} documents and "
                f"{len(self.arms)} arms. Pass one number per document and arm, and at least one document."
            )
        bad = np.argwhere(~np.isfinite(scores))
        if len(bad):
            row, column = bad[0]
            raise StatebridgeError(
                f"The score of document {self.documents[row]!r} under {self.arms[column]!r} is "
                f"{scores[row, column]}. Leave the document out of every arm, or score it again."
            )
        scores.setflags(write=False)
        object.__setattr__(self, "scores", scores)

    @classmethod
    def from_columns(cls, documents: Sequence[object], columns: Mapping[str, ArrayLike]) -> Self:
        """Build a table from one aligned array `[N]` per arm."""
        ids = tuple(str(document) for document in documents)
        arrays = {arm: np.asarray(column, dtype=np.float64) for arm, column in columns.items()}
        for arm, array in arrays.items():
            if array.shape != (len(ids),):
                raise StatebridgeError(
                    f"The arm {arm!r} has scores of shape {array.shape} for {len(ids)} documents. "
                    "Pass one number per document."
                )
        return cls(
            ids, tuple(arrays), np.stack(list(arrays.values()), axis=1) if arrays else np.empty((0, 0))
        )

    @classmethod
    def from_rows(cls, scores: Mapping[str, Mapping[str, float]]) -> Self:
        """Build a table from arm -> document -> score, in whatever order each arm has its documents."""
        documents = tuple(dict.fromkeys(document for column in scores.values() for document in column))
        for arm, column in scores.items():
            missing = [document for document in documents if document not in column]
            if missing:
                raise StatebridgeError(
                    f"{len(missing)} of {len(documents)} documents have no score under {arm!r}, the first is "
                    f"{missing[0]!r}. Score them, or leave them out of every arm."
                )
        return cls.from_columns(documents, {arm: [col[d] for d in documents] for arm, col in scores.items()})

    @classmethod
    def by_position(cls, documents: Sequence[object], columns: Mapping[str, ArrayLike]) -> tuple[Self, ...]:
        """Build one table per position from one aligned array `[N, P]` per arm."""
        arrays = {arm: np.asarray(column, dtype=np.float64) for arm, column in columns.items()}
        widths = {array.shape[1:] for array in arrays.values()}
        if len(widths) != 1 or len(next(iter(widths))) != 1:
            raise StatebridgeError(
                f"Scores by position must be [documents, positions] with as many positions in every arm, found "
                f"{ {arm: array.shape for arm, array in arrays.items()} }."
            )
        ((positions,),) = widths
        return tuple(
            cls.from_columns(documents, {arm: array[:, p] for arm, array in arrays.items()})
            for p in range(positions)
        )

    def __getitem__(self, arm: str) -> Array:
        """Return the scores `[N]` of one arm."""
        if arm not in self.arms:
            raise StatebridgeError(f"There is no arm {arm!r} among {', '.join(self.arms)}. Run it first.")
        return self.scores[:, self.arms.index(arm)]

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.documents)
