"""Statistics of an evaluation: paired bootstrap over documents, metrics, factorial effects, token agreement.

This room knows arrays and arm names; models and reports are elsewhere.
"""

from statebridge.stats.bootstrap import Bootstrap, Interval, mean, ratio_of_means
from statebridge.stats.factorial import cells, contrast, effects
from statebridge.stats.metrics import (
    Ratio,
    difference,
    excess,
    gap_ratio,
    improvement_fraction,
    improvement_ratio,
    mean_score,
    ncr,
    ncr_ratio,
    remaining_gap_fraction,
    tqr,
    tqr_ratio,
)
from statebridge.stats.table import ScoreTable
from statebridge.stats.tokens import TokenAgreement, token_agreement

__all__ = [
    "Bootstrap",
    "Interval",
    "Ratio",
    "ScoreTable",
    "TokenAgreement",
    "cells",
    "contrast",
    "difference",
    "effects",
    "excess",
    "gap_ratio",
    "improvement_fraction",
    "improvement_ratio",
    "mean",
    "mean_score",
    "ncr",
    "ncr_ratio",
    "ratio_of_means",
    "remaining_gap_fraction",
    "token_agreement",
    "tqr",
    "tqr_ratio",
]
