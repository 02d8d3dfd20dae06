"""Is this rung faster than that one, or has the machine drifted? A verdict that A/A runs put to the test.

In: the speeds of rungs, each run between two runs of the control, in the order they were run. Out: ratios
with 95% intervals. What scatters most is not a run's steps but runs of the same thing (clocks, memory
layout, neighbours), so the scatter is taken from the controls, never from within a run alone.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from train.intervals import t_quantile


@dataclass(frozen=True)
class Difference:
    """A ratio of two speeds and its 95% interval."""

    ratio: float
    low: float
    high: float

    @property
    def different(self) -> bool:
        """Whether the interval excludes that both are equally fast."""
        return not self.low <= 1 <= self.high


@dataclass(frozen=True)
class Ladder:
    """Speeds (tokens/s) of one session: control, rung, control, rung, ..., control."""

    controls: Sequence[float]
    """One more than there are rungs."""
    rungs: Sequence[float | None]
    """None for a rung without a speed."""

    def __post_init__(self) -> None:
        assert len(self.controls) == len(self.rungs) + 1, "every rung runs between two controls"

    @property
    def variance(self) -> float:
        """Variance of the log speed between runs of the same thing: neighbouring controls differ by twice that."""
        logs = [math.log(speed) for speed in self.controls]
        return sum((b - a) ** 2 for a, b in itertools.pairwise(logs)) / (2 * (len(logs) - 1))

    def over_control(self, rung: int) -> Difference | None:
        """Rung ``rung`` over the controls around it: a drift that is linear in time cancels."""
        place = self._place(rung)
        # One run against the mean of two: its own variance and half of one more.
        return None if place is None else self._difference(place, 1.5)

    def over_rung(self, rung: int, other: int) -> Difference | None:
        """Rung ``rung`` over rung ``other``, each seen against its own controls."""
        place, base = self._place(rung), self._place(other)
        if place is None or base is None:
            return None
        # Neighbours share a control, which cancels: the variances of two runs and twice a quarter.
        return self._difference(place - base, 2.5 if abs(rung - other) == 1 else 3.0)

    def _place(self, rung: int) -> float | None:
        speed = self.rungs[rung]
        if speed is None:
            return None
        return math.log(speed) - (math.log(self.controls[rung]) + math.log(self.controls[rung + 1])) / 2

    def _difference(self, logarithm: float, runs: float) -> Difference:
        reach = t_quantile(len(self.controls) - 1) * math.sqrt(runs * self.variance)
        return Difference(math.exp(logarithm), math.exp(logarithm - reach), math.exp(logarithm + reach))
