"""Intervals keep their promise on series whose truth is known, correlated ones too."""

import math

import numpy as np
import pytest
from scipy import stats

from train.intervals import (
    Estimate,
    anytime_half_width,
    autocorrelation,
    batch_means,
    median_interval,
    power_product,
    t_quantile,
)


def correlated(random: np.random.Generator, count: int, memory: float) -> np.ndarray:
    """A first-order autoregression about 1 with a spread of 2%."""
    noise = random.normal(0, 0.02 * np.sqrt(1 - memory**2), count + 200)
    series = np.zeros(count + 200)
    for step in range(1, len(series)):
        series[step] = memory * series[step - 1] + noise[step]
    return 1 + series[200:]


@pytest.mark.parametrize(("memory", "least"), [(0.0, 0.92), (0.8, 0.88)])
def test_the_interval_holds_the_truth_although_steps_are_correlated(memory: float, least: float) -> None:
    random = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        _, low, high = median_interval(batch_means(correlated(random, 600, memory).tolist()))
        held += low <= 1 <= high
    assert held / 400 >= least


def test_a_recurring_stall_counts() -> None:
    steps = [1.0] * 1000
    steps[::40] = [2.0] * 25
    middle, _, _ = median_interval(batch_means(steps))
    assert middle == pytest.approx(1.025, abs=0.01)


def test_stopping_by_the_sequence_is_wrong_in_at_most_one_of_twenty() -> None:
    random = np.random.default_rng(1)
    wrong = 0
    for _ in range(200):
        values = random.normal(1, 0.02, 200).tolist()
        wrong += any(abs(np.mean(values[:n]) - 1) > anytime_half_width(values[:n]) for n in range(10, 200, 3))
    assert wrong / 200 <= 0.05


def test_the_sequence_is_narrowest_at_thirty_values() -> None:
    """Relative to the standard error, of which it takes three where an interval that is read once takes two."""
    factors = {
        count: anytime_half_width([1.0, 2.0] * (count // 2)) / np.std([1.0, 2.0] * (count // 2), ddof=1) * count**0.5
        for count in range(2, 100, 2)
    }
    assert abs(min(factors, key=lambda count: factors[count]) - 30) <= 2
    assert factors[30] == pytest.approx(3.035, abs=0.001)
    assert anytime_half_width([1.0]) == math.inf


def test_short_series_use_students_interval() -> None:
    middle, low, high = median_interval([1.0, 1.1, 0.9])
    assert middle == 1.0
    assert high - low == pytest.approx(2 * 4.3027 * 0.1 / 3**0.5, rel=1e-3)


def test_longer_series_use_order_statistics() -> None:
    for count in (6, 7, 8, 9, 17, 30, 59, 200):
        values = np.random.default_rng(count).normal(size=count).tolist()
        expected = stats.quantile_test(values, q=0, p=0.5).confidence_interval(0.95)
        assert median_interval(values) == (np.median(values), expected.low, expected.high)


def test_t_quantiles_match_the_tables() -> None:
    table = {1: 12.7062, 1.6: 5.5172, 3: 3.1824, 9: 2.2622, 60: 2.0003}
    assert {freedom: t_quantile(freedom) for freedom in table} == pytest.approx(table, rel=1e-4)


def test_without_a_second_value_there_is_no_interval() -> None:
    for values in ([], [1.0]):
        with pytest.raises(ValueError, match=r"at least two|no median"):
            median_interval(values)


def test_neighbors_that_resemble_each_other_are_correlated() -> None:
    assert autocorrelation([1.0, 2.0, 3.0, 4.0]) == pytest.approx(1)
    assert autocorrelation([1.0, 2.0, 1.0, 2.0, 1.0]) == pytest.approx(-1)
    assert autocorrelation(correlated(np.random.default_rng(0), 4000, 0.8).tolist()) == pytest.approx(0.8, abs=0.05)
    for too_few_or_equal in ([], [3.0], [3.0, 4.0], [3.0, 3.0, 3.0]):
        assert autocorrelation(too_few_or_equal) == 0.0


def test_batches_grow_until_they_are_uncorrelated() -> None:
    random = np.random.default_rng(0)
    assert len(batch_means(random.normal(1, 0.02, 600).tolist())) == 30
    slow = batch_means(correlated(random, 600, 0.97).tolist())
    assert 10 <= len(slow) < 30
    assert len(batch_means([1.0, 2.0, 3.0])) == 3, "too few to be put together"


def test_a_ratios_interval_is_made_of_both() -> None:
    """On the logarithm the distances add by their squares, and the divisor's upper end makes the lower one."""
    first, second = Estimate(8.0, 4.0, 8.0 * math.e**3), Estimate(2.0, 2.0 / math.e, 2.0 * math.e**4)
    ratio = power_product([(first, 1.0), (second, -1.0)])
    assert ratio.middle == pytest.approx(4)
    assert math.log(ratio.middle / ratio.low) == pytest.approx(math.hypot(math.log(2), 4))
    assert math.log(ratio.high / ratio.middle) == pytest.approx(math.hypot(3, 1))
    root = power_product([(second, 0.5)], log_error=2.0)
    assert root.middle == pytest.approx(2**0.5)
    assert math.log(root.high / root.middle) == pytest.approx(math.hypot(2, 2))
    assert math.log(root.middle / root.low) == pytest.approx(math.hypot(0.5, 2))
    assert Estimate(8.0, 6.0, 11.0).width == 0.625
