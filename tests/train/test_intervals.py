"""Intervals keep their promise on series whose truth is known, correlated ones too."""

import numpy as np
import pytest

from train.intervals import anytime_half_width, autocorrelation, batch_means, median_interval, t_quantile


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


def test_taking_correlated_steps_for_independent_breaks_the_promise() -> None:
    random = np.random.default_rng(0)
    held = 0
    for _ in range(200):
        _, low, high = median_interval(correlated(random, 600, 0.8).tolist())
        held += low <= 1 <= high
    assert held / 200 < 0.7


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


def test_short_series_use_students_interval() -> None:
    middle, low, high = median_interval([1.0, 1.1, 0.9])
    assert middle == 1.0
    assert high - low == pytest.approx(2 * 4.3027 * 0.1 / 3**0.5, rel=1e-3)


@pytest.mark.parametrize(("freedom", "value"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (9, 2.2622), (60, 2.0003)])
def test_t_quantiles_match_the_tables(freedom: int, value: float) -> None:
    assert t_quantile(freedom) == pytest.approx(value, rel=2e-3)


def test_autocorrelation_of_a_constant_is_none() -> None:
    assert autocorrelation([3.0, 3.0, 3.0]) == 0.0
