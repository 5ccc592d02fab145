"""What an evaluation says about an arm, from per-document NLL (nats per token, smaller is better).

    excess                = arm - native
    NCR                   = (empty - arm) / (empty - native)             ratio of means
    TQR                   = (source - arm) / (source - native)           ratio of means
    remaining-gap fraction = (base - arm) / (base - native)              ratio of means, all documents kept
    improvement fraction  = (kv_only - arm) / (kv_only - native)         mean of per-document ratios

A ratio of means is taken again in every resample. A denominator that is not positive leaves the ratio
undefined: per document as NaN (such documents are left out of the mean of ratios), in the headline as an
undefined interval. This module knows arms by name only. Source: arXiv 2609.25053.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from statebridge.stats.bootstrap import Array, Bootstrap, Interval, mean, positive_ratio, ratio_of_means
from statebridge.stats.table import ScoreTable


@dataclass(frozen=True, eq=False)
class Ratio:
    """Numerator and denominator of a ratio metric, per document.

    Parameters
    ----------
    numerator, denominator
        `[N]` each, float64.
    """

    numerator: Array
    denominator: Array

    def per_document(self) -> Array:
        """Return the ratio of each document `[N]`, NaN where its denominator is not positive."""
        return positive_ratio(self.numerator, self.denominator)

    def of_means(self, bootstrap: Bootstrap) -> Interval:
        """Return mean(numerator) / mean(denominator), both means taken in each resample."""
        return bootstrap(ratio_of_means, self.numerator, self.denominator)

    def mean_of_ratios(self, bootstrap: Bootstrap) -> Interval:
        """Return the mean of the per-document ratios over the documents where they are defined (n counts those)."""
        ratios = self.per_document()
        kept = ratios[~np.isnan(ratios)]
        return bootstrap(mean, kept) if len(kept) else bootstrap.undefined(0)


def mean_score(table: ScoreTable, arm: str, bootstrap: Bootstrap) -> Interval:
    """Return the mean score of an arm."""
    return bootstrap(mean, table[arm])


def difference(table: ScoreTable, arm: str, other: str, bootstrap: Bootstrap) -> Interval:
    """Return the mean paired difference arm - other; negative where `arm` is the better one."""
    return bootstrap(mean, table[arm] - table[other])


def excess(table: ScoreTable, arm: str, bootstrap: Bootstrap, native: str = "native") -> Interval:
    """Return how much worse than the native receiver an arm is."""
    return difference(table, arm, native, bootstrap)


def ncr_ratio(table: ScoreTable, arm: str, native: str = "native", empty: str = "empty") -> Ratio:
    """Return the terms of NCR: the share of the prefix's worth that the arm recovers (1 is native, 0 empty)."""
    return Ratio(table[empty] - table[arm], table[empty] - table[native])


def tqr_ratio(table: ScoreTable, arm: str, native: str = "native", source: str = "source") -> Ratio:
    """Return the terms of TQR: the share of the receiver's advantage over the source that the arm keeps."""
    return Ratio(table[source] - table[arm], table[source] - table[native])


def improvement_ratio(table: ScoreTable, arm: str, native: str = "native", kv_only: str = "kv_only") -> Ratio:
    """Return the terms of the improvement fraction: the share of the KV-only excess that the arm removes."""
    return Ratio(table[kv_only] - table[arm], table[kv_only] - table[native])


def gap_ratio(table: ScoreTable, arm: str, base: str, native: str = "native") -> Ratio:
    """Return the terms of the remaining-gap fraction: the share of the excess of `base` that the arm removes."""
    return Ratio(table[base] - table[arm], table[base] - table[native])


def ncr(table: ScoreTable, arm: str, bootstrap: Bootstrap) -> Interval:
    """Return NCR as a ratio of means."""
    return ncr_ratio(table, arm).of_means(bootstrap)


def tqr(table: ScoreTable, arm: str, bootstrap: Bootstrap) -> Interval:
    """Return TQR as a ratio of means."""
    return tqr_ratio(table, arm).of_means(bootstrap)


def remaining_gap_fraction(table: ScoreTable, arm: str, base: str, bootstrap: Bootstrap) -> Interval:
    """Return the remaining-gap fraction as a ratio of means, all documents kept."""
    return gap_ratio(table, arm, base).of_means(bootstrap)


def improvement_fraction(table: ScoreTable, arm: str, bootstrap: Bootstrap) -> Interval:
    """Return the improvement fraction as the mean of the per-document ratios."""
    return improvement_ratio(table, arm).mean_of_ratios(bootstrap)
