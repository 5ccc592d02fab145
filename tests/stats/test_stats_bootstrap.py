"""The bootstrap itself: its draw, its coverage, its corners; and the score table's checks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from statebridge.errors import StatebridgeError
from statebridge.stats import (
    Bootstrap,
    Interval,
    ScoreTable,
    contrast,
    difference,
    effects,
    improvement_fraction,
    improvement_ratio,
    mean,
    ncr,
    ratio_of_means,
    remaining_gap_fraction,
    tqr,
    tqr_ratio,
)

RNG = np.random.default_rng(7)
SCORES = RNG.gamma(4.0, 0.5, size=37)  # skewed, and no power of two


def _naive(seed: int, statistic, *columns: np.ndarray) -> list[float]:
    """The recipe, word for word, one resample at a time."""
    n = len(columns[0])
    index = np.random.default_rng(seed).integers(0, n, size=(10000, n))
    values = [statistic(*(column[row] for column in columns)) for row in index]
    return list(np.quantile(values, [0.025, 0.975]))


def test_the_draw_is_the_recipe() -> None:
    """Equal to the loop to 1e-15 relative, for a mean and for a ratio of two paired columns."""
    interval = Bootstrap(seed=11)(mean, SCORES)
    assert [interval.low, interval.high] == pytest.approx(_naive(11, np.mean, SCORES), rel=1e-15)
    assert interval.estimate == pytest.approx(SCORES.mean(), rel=1e-15)
    under = SCORES + RNG.normal(size=37) * 0.1
    interval = Bootstrap(seed=12)(ratio_of_means, SCORES, under)
    naive = _naive(12, lambda a, b: np.mean(a) / np.mean(b), SCORES, under)
    assert [interval.low, interval.high] == pytest.approx(naive, rel=1e-14)


@pytest.mark.parametrize("cells", [1, 37 * 3, 37 * 999 + 5])
def test_blocks_do_not_change_the_draw(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-exact, however few resamples fit into a block."""
    whole = Bootstrap(seed=3)(mean, SCORES)
    monkeypatch.setattr("statebridge.stats.bootstrap._CELLS", cells)
    assert Bootstrap(seed=3)(mean, SCORES) == whole


def test_every_interval_starts_afresh() -> None:
    bootstrap = Bootstrap(seed=3)
    assert bootstrap(mean, SCORES) == bootstrap(mean, SCORES)
    assert bootstrap(mean, SCORES) != Bootstrap(seed=4)(mean, SCORES)


def test_level_and_resamples_are_honoured() -> None:
    wide, narrow = Bootstrap(3, level=0.99)(mean, SCORES), Bootstrap(3, level=0.8)(mean, SCORES)
    assert wide.low < narrow.low < narrow.estimate < narrow.high < wide.high
    assert (narrow.level, Bootstrap(3, resamples=50)(mean, SCORES).resamples) == (0.8, 50)
    for bad in ({"level": 1.0}, {"level": 0.0}, {"resamples": 0}):
        with pytest.raises(StatebridgeError, match="level between 0 and 1"):
            Bootstrap(3, **bad)


@pytest.mark.parametrize("draw", ["normal", "paired"])
def test_a_95_percent_interval_covers_95_percent(draw: str) -> None:
    """2,000 synthetic experiments of 100 documents with a known truth: 95 % ± 2 % of the intervals hold it."""
    rng = np.random.default_rng(2024)
    hits, experiments = 0, 2000
    for seed in range(experiments):
        if draw == "normal":
            truth, interval = 0.3, Bootstrap(seed, 400)(mean, rng.normal(0.3, 1.0, size=100))
        else:  # a ratio of paired means whose columns share most of their spread, as arms do
            shared = rng.gamma(4.0, 0.5, size=100)
            columns = 0.5 * shared + rng.normal(0, 0.2, 100), shared + rng.normal(0, 0.2, 100)
            truth, interval = 0.5, Bootstrap(seed, 400)(ratio_of_means, *columns)
        hits += interval.low <= truth <= interval.high
    assert 0.93 <= hits / experiments <= 0.97


def test_pairing_is_kept() -> None:
    """Arms that share their documents' spread: the paired interval is far narrower than either arm's."""
    table = ScoreTable.from_columns(range(37), {"a": SCORES, "b": SCORES + 0.1 + RNG.normal(0, 0.01, 37)})
    paired = difference(table, "b", "a", Bootstrap(0))
    alone = Bootstrap(0)(mean, table["a"])
    assert paired.high - paired.low < (alone.high - alone.low) / 20
    assert paired.excludes(0)
    assert not alone.excludes(alone.estimate)


def test_printing() -> None:
    shown = Interval(-0.74732, -0.80467, -0.69205, 0.95, 64, 10000, 1)
    assert str(shown) == "−0.7473 [−0.8047, −0.6921]"
    assert str(Bootstrap(0)(mean, [0.25])) == "0.2500 [−∞, ∞]"
    assert str(Bootstrap(0).undefined(3)) == "undefined"


def test_one_document_says_nothing_about_the_spread() -> None:
    interval = Bootstrap(0)(mean, [0.25])
    assert (interval.estimate, interval.low, interval.high) == (0.25, -math.inf, math.inf)
    assert not interval.excludes(0)


def test_identical_arms_differ_by_nothing() -> None:
    table = ScoreTable.from_columns(range(37), {"a": SCORES, "b": SCORES, "native": SCORES, "empty": SCORES})
    interval = difference(table, "a", "b", Bootstrap(0))
    assert (interval.estimate, interval.low, interval.high) == (0.0, 0.0, 0.0)
    assert not interval.excludes(0)
    undefined = ncr(table, "a", Bootstrap(0))  # 0 / 0
    assert math.isnan(undefined.estimate)
    assert math.isnan(undefined.low)
    assert not undefined.excludes(0)


def test_a_source_better_than_native_leaves_tqr_undefined() -> None:
    table = ScoreTable.from_columns("ab", {"source": [1.0, 1.0], "native": [2.0, 2.0], "arm": [1.5, 1.5]})
    assert math.isnan(tqr(table, "arm", Bootstrap(0)).estimate)
    assert np.isnan(tqr_ratio(table, "arm").per_document()).all()


def test_resamples_without_a_ratio_widen_the_interval() -> None:
    """A denominator positive on the whole, but not in every resample: the bounds do not pretend otherwise."""
    under = np.array([1.0, 1.0, 1.0, -2.0])
    interval = Bootstrap(0)(ratio_of_means, np.ones(4), under)
    assert interval.estimate == 4.0
    assert (interval.low, interval.high) == (-math.inf, math.inf)
    # one resample in 4^4 has no ratio: fewer than 2.5 %, so both bounds are still numbers
    interval = Bootstrap(0)(ratio_of_means, np.ones(4), np.array([1.0, 1.0, 1.0, -0.1]))
    drawn = np.random.default_rng(0).integers(0, 4, size=(10000, 4))
    missing = float((drawn == 3).all(1).mean())
    assert 0 < missing < 0.025
    assert 1.0 <= interval.low < interval.estimate < interval.high < math.inf


def test_improvement_leaves_out_documents_without_a_gap() -> None:
    table = ScoreTable.from_columns(
        "abcd",
        {"kv_only": [3.0, 2.0, 1.0, 1.5], "native": [1.0, 1.0, 1.0, 2.0], "arm": [2.0, 1.25, 9.0, 9.0]},
    )
    per_document = improvement_ratio(table, "arm").per_document()
    np.testing.assert_array_equal(per_document, [0.5, 0.75, math.nan, math.nan])
    interval = improvement_fraction(table, "arm", Bootstrap(0))
    assert (interval.estimate, interval.n) == (0.625, 2)
    none = ScoreTable.from_columns("ab", {"kv_only": [1.0, 1.0], "native": [1.0, 2.0], "arm": [1.0, 1.0]})
    assert str(improvement_fraction(none, "arm", Bootstrap(0))) == "undefined"


def test_the_remaining_gap_is_a_ratio_of_means() -> None:
    """Not a mean of ratios, and a document with a negative gap is kept."""
    table = ScoreTable.from_columns(
        "abc", {"base": [2.0, 3.0, 1.0], "native": [1.0, 1.0, 1.5], "arm": [1.5, 1.0, 1.25]}
    )
    gap = remaining_gap_fraction(table, "arm", "base", Bootstrap(0))
    assert gap.estimate == pytest.approx((0.5 + 2.0 - 0.25) / (1.0 + 2.0 - 0.5), rel=1e-15)


def test_effects_of_a_planted_design() -> None:
    """Scores built from known coefficients on D = -1, T = +1: main effects come back twice, and so on."""
    coefficients = {(0,): 0.5, (1,): -0.25, (2,): 0.125, (0, 2): 2.0, (0, 1, 2): -4.0}
    levels = {"D": -1, "T": 1}
    columns = {
        cell: SCORES
        + sum(c * math.prod(levels[cell[m]] for m in members) for members, c in coefficients.items())
        for cell in (a + b + c for a in "DT" for b in "DT" for c in "DT")
    }
    table = ScoreTable.from_columns(range(37), columns)
    got = {name: interval.estimate for name, interval in effects(table, Bootstrap(0)).items()}
    expected = {"K": 1.0, "R": -0.5, "C": 0.25, "K×R": 0.0, "K×C": 8.0, "R×C": 0.0, "K×R×C": -32.0}
    assert got == pytest.approx(expected, abs=1e-12)
    high = np.mean([columns[c] for c in columns if c[0] == "T"], axis=0)
    low = np.mean([columns[c] for c in columns if c[0] == "D"], axis=0)
    np.testing.assert_allclose(contrast(table, [0], 3), high - low, atol=1e-12)
    with pytest.raises(StatebridgeError, match="'DDD'"):
        effects(ScoreTable.from_columns([1], {"TTT": [1.0]}), Bootstrap(0))


def test_rows_are_aligned_by_document() -> None:
    table = ScoreTable.from_rows({"a": {"x": 1.0, "y": 2.0}, "b": {"y": 20.0, "x": 10.0}})
    assert table.documents == ("x", "y")
    assert table["b"].tolist() == [10.0, 20.0]
    assert len(table) == 2
    with pytest.raises(StatebridgeError, match="1 of 2 documents have no score under 'b', the first is 'y'"):
        ScoreTable.from_rows({"a": {"x": 1.0, "y": 2.0}, "b": {"x": 10.0}})
    with pytest.raises(StatebridgeError, match="under 'a', the first is 'z'"):
        ScoreTable.from_rows({"a": {"x": 1.0}, "b": {"x": 10.0, "z": 1.0}})


def test_tables_by_position() -> None:
    tables = ScoreTable.by_position("xy", {"a": [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], "b": np.zeros((2, 3))})
    assert [table["a"].tolist() for table in tables] == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]
    with pytest.raises(StatebridgeError, match="as many positions"):
        ScoreTable.by_position("xy", {"a": np.zeros((2, 3)), "b": np.zeros((2, 2))})


def test_a_table_is_complete_and_stays_as_it_is() -> None:
    column = np.array([1.0, 2.0])
    table = ScoreTable.from_columns("xy", {"a": column})
    column[0] = 9.0
    assert table["a"].tolist() == [1.0, 2.0]
    scores = np.array([[1.0], [2.0]])
    direct = ScoreTable(("x", "y"), ("a",), scores)
    scores[0] = 9.0
    assert direct["a"].tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        table["a"][0] = 9.0
    with pytest.raises(StatebridgeError, match="no arm 'b' among a"):
        table["b"]
    with pytest.raises(StatebridgeError, match="document 'y' under 'a' is nan"):
        ScoreTable.from_columns("xy", {"a": [1.0, math.nan]})
    with pytest.raises(StatebridgeError, match="document 'x' is scored twice"):
        ScoreTable.from_columns("xx", {"a": [1.0, 2.0]})
    with pytest.raises(StatebridgeError, match="arm 'a' has scores of shape"):
        ScoreTable.from_columns("xyz", {"a": [1.0, 2.0]})
    with pytest.raises(StatebridgeError, match="at least one document"):
        ScoreTable.from_columns("", {"a": []})


def test_bad_columns_are_refused() -> None:
    with pytest.raises(StatebridgeError, match="equally long"):
        Bootstrap(0)(ratio_of_means, [1.0, 2.0], [1.0])
    with pytest.raises(StatebridgeError, match="not empty"):
        Bootstrap(0)(mean, [])
    with pytest.raises(StatebridgeError, match="Column 1 holds inf at document 1"):
        Bootstrap(0)(ratio_of_means, [1.0, 2.0], [1.0, math.inf])
