"""The stopping rule: it may look after every step and still seldom stops what could win."""

from collections.abc import Callable
from types import ModuleType

import pytest

from tune.config import MIN_MEASURED_STEPS
from tune.trial.early_stop import verdict

Benchmark = Callable[[str], ModuleType]


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.7])
def test_a_trial_as_fast_as_the_bar_is_seldom_stopped(benchmark: Benchmark, correlation: float) -> None:
    simulation = benchmark("false_stops")
    assert sum(simulation.stops_by_mistake(correlation, seed) for seed in range(200)) < 0.05 * 200


def test_a_slow_trial_is_stopped_early(benchmark: Benchmark) -> None:
    simulation = benchmark("false_stops")
    stops = [simulation.stopped_after(simulation.steps(seed, 1.1, 0.5), 1.0) for seed in range(50)]
    assert all(stop is not None and stop <= 3 * MIN_MEASURED_STEPS for stop in stops)
    assert sum(stop is not None and stop <= 2 * MIN_MEASURED_STEPS for stop in stops) >= 0.95 * len(stops)


def test_it_ends_when_the_speed_is_known() -> None:
    assert verdict([1.0] * (MIN_MEASURED_STEPS + 10), threshold_seconds=None, precision=0.01) == "precise"
    assert verdict([1.0] * (1 + MIN_MEASURED_STEPS), threshold_seconds=None, precision=0.01) == "precise", (
        "the first is warm-up"
    )
    assert verdict([1.0] * MIN_MEASURED_STEPS, threshold_seconds=None, precision=0.01) is None


def test_precision_is_a_share_of_the_step() -> None:
    """Steps of minutes need no precision of a hundredth of a second, and of milliseconds more than that."""
    noise = [0.999, 1.001, 1.0, 1.002, 0.998] * 4
    assert verdict([200.0 * part for part in noise], threshold_seconds=None, precision=0.01) == "precise"
    noise = [0.6, 1.4, 1.1, 0.9, 1.0] * 4
    assert verdict([0.002 * part for part in noise], threshold_seconds=None, precision=0.01) is None


def test_steps_of_the_warmup_do_not_count() -> None:
    assert verdict([9.0, *[2.0] * 6, *[1.0] * 30], threshold_seconds=None, precision=0.2) == "precise"
