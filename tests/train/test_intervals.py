"""Intervals keep their promise on series whose truth is known, correlated ones too."""

import math

import numpy as np
import pytest
from scipy import stats

from train.intervals import (
    Difference,
    Estimate,
    Scatter,
    anytime_half_width,
    autocorrelation,
    batch_means,
    mean_ratio,
    median_interval,
    pool,
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


def test_a_speed_and_a_difference_have_one_text() -> None:
    assert str(Estimate(661.4, 339.6, 749.9)) == "661 (95% CI 340 to 750)"
    assert Estimate(12345.0, 12000.0, 13000.0).interval == "12,000 to 13,000"
    gain, tie = Difference(2.95, 1.98, 4.39), Difference(1.0043, 0.998, 1.0106)
    assert (gain.ratio_text, gain.text, str(gain)) == (
        "x2.95", "x2.95, x1.98 to x4.39", "x2.95 (95% CI x1.98 to x4.39)",
    )  # fmt: skip
    assert (tie.ratio_text, tie.text) == ("(x1.004)", "(x1.004, x0.998 to x1.011)")
    assert str(tie) == "x1.004 (95% CI x0.998 to x1.011; not significant)"


def test_several_runs_are_pooled_with_the_scatter_between_them() -> None:
    """The scatter of all repeated configurations counts: of one with two runs it has one degree of freedom."""
    run = Estimate(1000.0, 980.0, 1050.0)
    scatter = Scatter.of([[1000.0, 1020.0], [500.0, 505.0, 510.0], [7.0]])
    assert scatter
    assert scatter.degrees_of_freedom == 3
    logs = [math.log(1.02) ** 2 / 2, 2 * np.var(np.log([500.0, 505.0, 510.0]), ddof=1)]
    assert scatter.variance == pytest.approx(sum(logs) / 3)
    assert pool([run], scatter) == run, "a single run is shown as it was measured"
    both = pool([run, run], scatter)
    between = t_quantile(3) * math.sqrt(scatter.variance / 2)
    assert both.middle == pytest.approx(1000)
    assert math.log(1000 / both.low) == pytest.approx(math.hypot(math.log(1000 / 980) / math.sqrt(2), between))
    assert math.log(both.high / 1000) == pytest.approx(math.hypot(math.log(1.05) / math.sqrt(2), between))
    assert Scatter.of([[1000.0], []]) is None


def test_pooled_intervals_hold_the_true_speed() -> None:
    """Also if the runs scatter far more than their steps, where the range of the runs would hold half of the time."""
    random = np.random.default_rng(5)
    covered = 0
    for _ in range(400):
        speeds = 1000 * np.exp(random.normal(0, 0.05, (3, 2)))
        scatter = Scatter.of(speeds.tolist())
        pooled = pool([Estimate(speed, 0.999 * speed, 1.001 * speed) for speed in speeds[0].tolist()], scatter)
        covered += pooled.low <= 1000 <= pooled.high
    assert 0.93 <= covered / 400 <= 0.98


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_the_interval_of_a_ratio_of_means_holds_it_also_if_the_divisor_may_be_zero(spread: float) -> None:
    random = np.random.default_rng(7)
    held = unbounded = 0
    for _ in range(400):
        bottom = random.normal(1, spread, 12)
        top = random.normal(5, 1, 12) + 0.5 * (bottom - 1)
        ratio = mean_ratio(top.tolist(), bottom.tolist())
        assert 0 <= ratio.low <= ratio.middle <= ratio.high
        held += ratio.low <= 5 <= ratio.high
        unbounded += math.isinf(ratio.high)
    assert 0.92 <= held / 400 <= 0.985
    assert (unbounded > 200) == (spread == 3.0)


def test_ratios_that_say_nothing_are_unbounded_and_no_ratio_is_negative() -> None:
    assert mean_ratio([1.0, -1.0, 0.5], [1.0, -1.0, 0.2])[1:] == (0.0, math.inf)
    assert mean_ratio([1.0, 1.1, 0.9], [-2.0, -2.1, -1.9]) == (math.inf, 0.0, math.inf)
    assert mean_ratio([-1.0, -1.1, -0.9], [2.0, 2.1, 1.9]) == (0.0, 0.0, 0.0)
    assert mean_ratio([3.0, 3.0], [2.0, 2.0]) == (1.5, 1.5, 1.5)
