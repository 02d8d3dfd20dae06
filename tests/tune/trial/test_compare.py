"""A ladder's verdicts: what is equal is seldom called different, whatever is uncertain, and what differs is found."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from train.intervals import Difference, Estimate, median_interval
from tune.trial.compare import InterleavedRuns

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"


def exact(*speeds: float) -> list[Estimate]:
    """Speeds of runs whose own steps leave nothing open."""
    return [Estimate(speed, speed, speed) for speed in speeds]


def within(speed: float, reach: float) -> Estimate:
    return Estimate(speed, speed - reach, speed + reach)


def verdict(ladder: InterleavedRuns, rung: int = 0) -> Difference:
    difference = ladder.over_control(rung)
    assert difference is not None
    return difference


def test_drift_is_not_mistaken_for_a_speedup() -> None:
    drifting = exact(*(1000 * 0.97**n for n in range(9)))
    ladder = InterleavedRuns(drifting[::2], drifting[1::2])
    for rung in range(4):
        difference = verdict(ladder, rung)
        assert difference.ratio == pytest.approx(1)
        assert not difference.is_significant


def test_a_rung_twice_as_fast_is_called_different() -> None:
    controls = exact(1000.0, 1010.0, 995.0, 1004.0)
    same, faster = exact(1001.0, 2003.0)
    ladder = InterleavedRuns(controls, [same, None, faster])
    assert not verdict(ladder, 0).is_significant
    assert ladder.over_control(1) is None
    assert ladder.over_rung(1, 0) is None
    assert verdict(ladder, 2).is_significant
    assert verdict(ladder, 2).ratio == pytest.approx(2.0, rel=0.01)
    step = ladder.over_rung(2, 0)
    assert step is not None
    assert step.is_significant


def test_a_gain_over_a_control_that_is_hardly_known_is_a_gain() -> None:
    """If no speed in its interval explains it. Its own interval shows how little is known of its size."""
    control = Estimate(701.0, 322.0, 1526.0)
    difference = verdict(InterleavedRuns([control, control._replace(middle=703.0)], [within(2675.0, 90.0)]))
    assert difference.ratio == pytest.approx(3.81, abs=0.01)
    assert difference.is_significant
    assert difference.high / difference.low > 1526 / 701, "the ratio is known no better than what it divides by"
    assert not verdict(InterleavedRuns([control, control], [within(1100.0, 90.0)])).is_significant


def test_two_speeds_alone_differ_if_their_intervals_do_not_touch() -> None:
    gain = Difference.between(Estimate(4026.0, 3364.0, 4819.0), Estimate(1365.0, 1098.0, 1697.0))
    assert gain.is_significant
    assert (gain.ratio, gain.low, gain.high) == pytest.approx((2.95, 1.98, 4.39), abs=0.005)
    assert not Difference.between(within(3000.0, 1500.0), within(1500.0, 10.0)).is_significant, "they touch"
    assert Difference.between(within(3000.0, 1489.0), within(1500.0, 10.0)).is_significant
    loss = Difference.between(within(1000.0, 10.0), within(1021.0, 10.0))
    assert loss.is_significant
    assert loss.high < 1


def test_an_interval_carries_those_of_all_its_runs() -> None:
    """With controls that agree, only the runs' own intervals are left: of logarithms, by the root of their squares."""
    control, rung = within(1000.0, 30.0), within(1200.0, 24.0)
    difference = verdict(InterleavedRuns([control, control], [rung]))
    low = math.hypot(math.log(1200 / 1176), 0.5 * math.log(1030 / 1000), 0.5 * math.log(1030 / 1000))
    high = math.hypot(math.log(1224 / 1200), 0.5 * math.log(1000 / 970), 0.5 * math.log(1000 / 970))
    assert difference.low == pytest.approx(1.2 * math.exp(-low))
    assert difference.high == pytest.approx(1.2 * math.exp(high))


def test_neighbors_share_a_control_that_cancels() -> None:
    """Its interval and its scatter leave the ratio of the rungs around it, and no other's."""
    sure, vague = within(1000.0, 1.0), within(1000.0, 100.0)
    rungs = exact(1200.0, 1200.0, 1200.0)
    ladder = InterleavedRuns([sure, vague, sure, sure], rungs)
    neighbors, apart = ladder.over_rung(1, 0), ladder.over_rung(2, 0)
    assert neighbors is not None
    assert apart is not None
    assert neighbors.high < 1.002 < apart.high
    scattered = InterleavedRuns(exact(1000.0, 1010.0, 1000.0, 1010.0), rungs)
    reaches = [
        math.log(difference.high / difference.ratio)
        for difference in (scattered.over_control(1), scattered.over_rung(1, 0), scattered.over_rung(2, 0))
        if difference
    ]
    assert reaches == pytest.approx([reaches[0], reaches[0] * math.sqrt(2.5 / 1.5), reaches[0] * math.sqrt(2)])


def test_the_scatter_of_few_controls_counts_for_little() -> None:
    """Two controls leave one degree of freedom, and three fewer than two, as neighbors share one."""
    two, three = (
        InterleavedRuns(exact(1000, 1010), exact(1000)),
        InterleavedRuns(exact(1000, 1010, 1000), exact(1000, 1000)),
    )
    assert (two.scatter.degrees_of_freedom, three.scatter.degrees_of_freedom) == (1.0, 1.6)
    assert math.log(verdict(two).high / verdict(two).ratio) == pytest.approx(
        12.7062 * math.sqrt(1.5 * math.log(1.01) ** 2 / 2), rel=1e-4
    )


def simulated(
    random: np.random.Generator, rungs: int, ratio: float, *, between: float, within: float, steps: int, drift: float
) -> InterleavedRuns:
    """A session of runs whose logs scatter, wander and drift, each known by ``steps`` batches of steps that scatter."""
    runs = []
    wander = np.cumsum(random.normal(0, between / 3, 2 * rungs + 1))
    for label in range(2 * rungs + 1):
        seconds = math.exp(drift * label + wander[label] + random.normal(0, between)) / (ratio if label % 2 else 1)
        batches = seconds * np.exp(random.normal(0, within, steps))
        middle, fast, slow = median_interval(batches.tolist())
        runs.append(Estimate(1 / middle, 1 / slow, 1 / max(fast, batches.min())))
    return InterleavedRuns(runs[::2], runs[1::2])


MACHINES = {
    "quiet": {"between": 0.005, "within": 0.02, "steps": 30, "drift": 0.0},
    "drifting": {"between": 0.005, "within": 0.02, "steps": 30, "drift": 0.02},
    "scattered": {"between": 0.05, "within": 0.05, "steps": 30, "drift": 0.005},
    "short runs": {"between": 0.01, "within": 0.05, "steps": 5, "drift": 0.0},
    "busy": {"between": 0.1, "within": 0.3, "steps": 7, "drift": 0.01},
}


@pytest.mark.parametrize("rungs", [1, 3, 10])
@pytest.mark.parametrize("machine", MACHINES)
def test_at_most_one_equal_rung_in_twenty_is_called_different(machine: str, rungs: int) -> None:
    random = np.random.default_rng(3)
    ladders = [simulated(random, rungs, 1.0, **MACHINES[machine]) for _ in range(600 // rungs)]
    alarms = [verdict(ladder, rung).is_significant for ladder in ladders for rung in range(rungs)]
    assert sum(alarms) <= 0.05 * len(alarms)


@pytest.mark.parametrize("record", ["aa.json", "aa-busy.json"])
def test_at_most_one_recorded_pair_in_twenty_is_called_different(record: str) -> None:
    ladders = json.loads((RECORDS / record).read_text(encoding="utf-8"))["speeds_by_ladder"]
    alarms: list[bool] = []
    for runs in ladders:
        speeds = [Estimate(*run) for run in runs]
        ladder = InterleavedRuns(speeds[::2], speeds[1::2])
        alarms += [verdict(ladder, rung).is_significant for rung in range(len(ladder.rungs))]
    assert len(alarms) == 100
    assert sum(alarms) <= 5


@pytest.mark.parametrize(
    ("machine", "rungs", "ratio"),
    [("quiet", 3, 1.08), ("quiet", 10, 0.95), ("drifting", 10, 1.3), ("scattered", 10, 1.5), ("busy", 10, 2.95)],
)
def test_a_real_effect_is_found(machine: str, rungs: int, ratio: float) -> None:
    random = np.random.default_rng(4)
    ladders = [simulated(random, rungs, ratio, **MACHINES[machine]) for _ in range(200 // rungs)]
    verdicts = [verdict(ladder, rung) for ladder in ladders for rung in range(rungs)]
    actual = [each.is_significant and (each.ratio > 1) is (ratio > 1) for each in verdicts]
    assert sum(actual) >= 0.9 * len(actual)
    held = [each.low <= ratio <= each.high for each in verdicts]
    assert sum(held) >= 0.95 * len(held)
