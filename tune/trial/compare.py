"""Comparison of rungs that separates their speedup from the machine's drift. The suite ``aa`` tests its verdicts.

Runs of the same config usually vary more than the steps within a run (clocks, memory layout, other processes), so this
variance is estimated from the controls. The intervals of the runs are added to it, because two controls with equal
speeds do not show how precise each measurement is.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from train.intervals import MAX_CONTROL_WIDTH, Estimate, power_product, t_quantile


@dataclass(frozen=True)
class Difference:
    """A ratio of two speeds and its 95% confidence interval."""

    ratio: float
    """Ratio of the speeds."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""
    control_width: float = 0.0
    """Width of the widest interval of the controls that the ratio depends on, as a fraction of the control's speed."""

    @property
    def is_inconclusive(self) -> bool:
        """Whether the control is too imprecise for any conclusion."""
        return self.control_width > MAX_CONTROL_WIDTH

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes equal speeds, and the control is precise enough for a conclusion."""
        return not (self.is_inconclusive or self.low <= 1 <= self.high)


def ratio_of(speed: Estimate, control: Estimate) -> Difference:
    """Compute the ratio of ``speed`` to the control's speed, with an interval from only their two intervals."""
    return Difference(*power_product([(speed, 1.0), (control, -1.0)]), control_width=control.width)


@dataclass(frozen=True)
class InterleavedRuns:
    """Speeds of runs in the order control, rung, control, rung, ..., control."""

    controls: Sequence[Estimate]
    """Speeds of the controls in tokens/s, one more than rungs."""
    rungs: Sequence[Estimate | None]
    """Speeds of the rungs in tokens/s; None for a rung without a speed."""

    def __post_init__(self) -> None:
        assert len(self.controls) == len(self.rungs) + 1, "every rung runs between two controls"

    @property
    def variance(self) -> float:
        """Variance of the log speed between runs of the same config: half the mean squared difference of controls."""
        logs = [math.log(control.middle) for control in self.controls]
        return sum((b - a) ** 2 for a, b in itertools.pairwise(logs)) / (2 * (len(logs) - 1))

    @property
    def degrees_of_freedom(self) -> float:
        """Degrees of freedom of :attr:`variance`, fewer than its differences, because adjacent ones share a control.

        They match the first two moments of the variance under a normal distribution (von Neumann et al., Annals of
        Mathematical Statistics 12, 1941): 1 for two controls, and two thirds of the number of differences for many.
        """
        count = len(self.controls)
        return 2 * (count - 1) ** 2 / (3 * count - 4)

    def over_control(self, rung: int) -> Difference | None:
        """Compute the speedup of a rung over the controls around it; a drift that is linear in time cancels."""
        return self._difference(_powers(rung), rung)

    def over_rung(self, rung: int, other: int) -> Difference | None:
        """Compute the speedup of a rung over another, each relative to its controls; a shared control cancels."""
        powers = _powers(rung)
        for position, power in _powers(other).items():
            powers[position] = powers.get(position, 0.0) - power
        return self._difference(powers, rung, other)

    def control_around(self, rung: int) -> Estimate:
        """Compute the control's speed at the time of a rung: the mean of two runs, whose intervals it covers."""
        earlier_run, later_run = self.controls[rung : rung + 2]
        middle = math.sqrt(earlier_run.middle * later_run.middle)
        return Estimate(middle, min(earlier_run.low, later_run.low), max(earlier_run.high, later_run.high))

    def _difference(self, powers: Mapping[int, float], *rungs: int) -> Difference | None:
        """Compute the product of the runs' speeds to these ``powers``, with their intervals and the variance."""
        factors = [(self._run(position), power) for position, power in powers.items() if power]
        speeds = [(run, power) for run, power in factors if run is not None]
        if len(speeds) < len(factors):
            return None
        log_error = t_quantile(self.degrees_of_freedom) * math.sqrt(
            self.variance * sum(power**2 for _, power in speeds)
        )
        width = max(self.control_around(rung).width for rung in rungs)
        return Difference(*power_product(speeds, log_error=log_error), control_width=width)

    def _run(self, position: int) -> Estimate | None:
        number, is_rung = divmod(position, 2)
        return self.rungs[number] if is_rung else self.controls[number]


def _powers(rung: int) -> dict[int, float]:
    """Return the powers of a rung and the controls around it in its speedup, by the position of their runs in the
    ladder."""
    return {2 * rung: -0.5, 2 * rung + 1: 1.0, 2 * rung + 2: -0.5}
