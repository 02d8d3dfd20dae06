"""The law of points holds the truth in its interval, which knows the points' deviations and the bounds of laws."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.estimate.power_law import PowerLaw, PowerLawDifference

laws = st.tuples(st.floats(0, 3), st.floats(0.2, 3), st.floats(0.05, 0.9))
counts = st.integers(2, 6)


def values(offset: float, scale: float, exponent: float, positions: list[float]) -> list[float]:
    return [offset + scale * position**-exponent for position in positions]


def doubling(count: int, first: float = 1.0) -> list[float]:
    return [first * 2.0**rung for rung in range(count)]


def law_of(positions: list[float], points: list[float], deviation: float = 0.005) -> PowerLaw:
    return PowerLaw(positions, points, [deviation] * len(points), 10, 0.3)


@given(laws, counts, st.floats(0.01, 1e6), st.floats(1, 8))
def test_the_interval_holds_an_exact_law_whatever_the_unit(
    law: tuple[float, float, float], count: int, unit: float, factor: float
) -> None:
    positions = doubling(count)
    target = positions[-1] * factor
    truth = values(*law, [target])[0]
    estimate = law_of(positions, values(*law, positions)).at(target)
    assert estimate.low <= estimate.middle <= estimate.high
    assert estimate.low - 0.0005 <= truth <= estimate.high + 0.0005, "up to the distance of the exponents considered"
    scaled = law_of([unit * x for x in positions], values(*law, positions)).at(unit * target)
    assert tuple(scaled) == pytest.approx(tuple(estimate), abs=1e-6)


@given(laws, counts, st.lists(st.floats(-0.05, 0.05), min_size=6, max_size=6))
def test_the_ends_fall_with_the_position_and_stay_positive(
    law: tuple[float, float, float], count: int, errors: list[float]
) -> None:
    points = [value * (1 + error) for value, error in zip(values(*law, doubling(count)), errors, strict=False)]
    estimates = [law_of(doubling(count), points).at(position) for position in np.geomspace(0.1, 1e4, 40)]
    for end in range(3):
        ends = [estimate[end] for estimate in estimates]
        assert ends == sorted(ends, reverse=True)
        assert ends[-1] >= 0


def test_more_points_and_smaller_deviations_narrow_the_interval_and_distance_widens_it() -> None:
    def width(count: int, deviation: float, factor: float) -> float:
        positions = doubling(count)
        estimate = law_of(positions, values(2, 1.5, 0.4, positions), deviation).at(factor * positions[-1])
        return estimate.high - estimate.low

    by_count = [width(count, 0.005, 4) for count in range(2, 7)]
    assert by_count == sorted(by_count, reverse=True)
    assert width(4, 0.001, 4) < 0.6 * width(4, 0.005, 4)
    assert width(4, 0.005, 2) < 0.6 * width(4, 0.005, 8)


def test_points_that_do_not_fall_have_a_flat_law() -> None:
    estimate = law_of(doubling(4), [3.0, 3.1, 3.3, 3.6]).at(32)
    assert 3.0 < estimate.middle < 3.6


@given(laws, st.floats(-0.2, 0.2), st.floats(0.9, 1.1), counts, st.floats(1, 4))
def test_the_difference_of_laws_with_one_exponent_is_held(
    law: tuple[float, float, float], offset: float, factor: float, count: int, reach: float
) -> None:
    positions = doubling(count)
    target = positions[-1] * reach

    def difference(at: list[float]) -> list[float]:
        return [offset + (factor - 1) * law[1] * position ** -law[2] for position in at]

    points, pairs = values(*law, positions), difference(positions)
    estimate = PowerLawDifference(positions, pairs, points, [0.005] * count, 10).at(target)
    assert estimate.low - 1e-9 <= difference([target])[0] <= estimate.high + 1e-9
    assert estimate.low <= estimate.middle <= estimate.high


def test_a_difference_is_that_of_its_points_where_they_are() -> None:
    positions = doubling(5)
    law = PowerLawDifference(positions, [0.1] * 5, values(2, 1, 0.3, positions), [0.004] * 5, 10)
    estimate = law.at(positions[-1])
    assert estimate.middle == pytest.approx(0.1)
    assert 0.08 < estimate.low < estimate.high < 0.12
    mirrored = PowerLawDifference(positions, [-0.1] * 5, law.means, law.deviations, 10).at(positions[-1])
    assert tuple(mirrored) == pytest.approx((-estimate.middle, -estimate.high, -estimate.low))


def test_residuals_that_exceed_the_deviations_widen_the_interval() -> None:
    positions = doubling(6)
    exact = values(2, 1, 0.3, positions)
    scattered = [value + 0.05 * (-1) ** rung for rung, value in enumerate(exact)]
    widths = [law.high - law.low for law in (law_of(positions, points).at(128) for points in (exact, scattered))]
    assert widths[1] > 2 * widths[0]
    assert math.isfinite(widths[1])
