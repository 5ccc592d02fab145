"""Main effects and interactions of a two-level factorial design.

With levels coded D = -1 and T = +1, the effect of a set of factors is, per document,

    effect = sum over cells of (product of the set's levels) * score / 2^(k - order)

for k factors: divisors 4, 2 and 1 for main effects, two-way and three-way interactions of the 2^3 design
over (K, R, C). A main effect is then the mean score of T less the mean score of D. This module does not
know what the factors are; it reads cell names such as "TDD", one letter per factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product

import numpy as np

from statebridge.stats.bootstrap import Array, Bootstrap, Interval, mean
from statebridge.stats.table import ScoreTable

LEVELS = {"D": -1, "T": 1}


def cells(factors: int) -> tuple[str, ...]:
    """Return the names of all cells, "DDD" first and the last factor changing fastest."""
    return tuple("".join(levels) for levels in product(LEVELS, repeat=factors))


def contrast(table: ScoreTable, members: Sequence[int], factors: int) -> Array:
    """Return the effect of a set of factors per document, `[N]`.

    Parameters
    ----------
    table
        Must hold every cell as an arm.
    members
        Positions of the factors: one for a main effect, several for their interaction.
    factors
        Number of factors k of the design.
    """
    total: Array = np.zeros(len(table))
    for cell in cells(factors):
        total += math.prod(LEVELS[cell[member]] for member in members) * table[cell]
    return total / float(2 ** (factors - len(members)))


def effects(
    table: ScoreTable, bootstrap: Bootstrap, factors: Sequence[str] = ("K", "R", "C")
) -> dict[str, Interval]:
    """Return every main effect and interaction with its interval.

    Parameters
    ----------
    table
        Scores with one arm per cell; other arms are ignored.
    bootstrap
        The recipe of the intervals.
    factors
        Names of the factors in the order of the cell letters.

    Returns
    -------
    dict
        Keys "K", "R", "C", "K×R", "K×C", "R×C", "K×R×C"; a negative main effect favours T.

    Raises
    ------
    StatebridgeError
        If a cell is missing (named).
    """
    k = len(factors)
    return {
        "×".join(factors[i] for i in members): bootstrap(mean, contrast(table, members, k))
        for order in range(1, k + 1)
        for members in combinations(range(k), order)
    }
