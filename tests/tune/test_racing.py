"""The stopping rule: it may look after every step and still seldom stops what could win."""

import math
import random

import pytest

from tune.racing import FEWEST, verdict


def steps(random_source: random.Random, seconds: float, count: int, correlation: float = 0.5) -> list[float]:
    """Step times with noise that is correlated from step to step."""
    drift, times = random_source.gauss(0, 0.01) / math.sqrt(1 - correlation**2), []
    for _ in range(count):
        drift = correlation * drift + random_source.gauss(0, 0.01)
        times.append(seconds * (1 + drift))
    return times


def stopped(times: list[float], bar: float) -> bool:
    """Whether the trial is ever stopped when the rule is asked after each step."""
    asked = range(1, len(times) + 1)
    return any(verdict(times[:n], bar_seconds=bar, precision=0.0) == "cannot win" for n in asked)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.7])
def test_a_trial_as_fast_as_the_bar_is_seldom_stopped(correlation: float) -> None:
    wrong = sum(stopped(steps(random.Random(seed), 1.0, 40, correlation), 1.0) for seed in range(200))
    assert wrong < 0.05 * 200


def test_a_slow_trial_is_stopped_early() -> None:
    assert all(stopped(steps(random.Random(seed), 1.1, 20), 1.0) for seed in range(50))


def test_it_ends_when_the_speed_is_known() -> None:
    assert verdict([1.0] * (FEWEST + 10), bar_seconds=None, precision=0.01) == "precise"
    assert verdict([1.0] * FEWEST, bar_seconds=None, precision=0.01) is None
