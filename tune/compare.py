"""Is this rung faster than that one, or has the machine drifted? The suite ``aa`` tests these verdicts.

Runs of the same config usually scatter more than the steps within a run (clocks, memory layout, other processes), so
the scatter is estimated from the controls. The runs' own intervals are added to it, because two controls that happen to
agree do not show how precisely either is known.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from train.intervals import WIDEST_CONTROL, Estimate, power_product, t_quantile


@dataclass(frozen=True)
class Difference:
    """A ratio of two speeds and its 95% interval."""

    ratio: float
    low: float
    high: float
    control_width: float = 0.0
    """Width of the widest interval of the control that the ratio rests on, as a fraction of the control's speed."""

    @property
    def unclear(self) -> bool:
        """Whether the control is too imprecise for any conclusion."""
        return self.control_width > WIDEST_CONTROL

    @property
    def different(self) -> bool:
        """Whether the interval excludes equal speeds, and the control is precise enough to say so."""
        return not (self.unclear or self.low <= 1 <= self.high)


def over(speed: Estimate, control: Estimate) -> Difference:
    """``speed`` over the control's, from their own intervals alone."""
    return Difference(*power_product([(speed, 1.0), (control, -1.0)]), control_width=control.width)


@dataclass(frozen=True)
class Interleaved:
    """Speeds (tokens/s) in the order of the runs: control, rung, control, rung, ..., control."""

    controls: Sequence[Estimate]
    """One more than the rungs."""
    rungs: Sequence[Estimate | None]
    """None for a rung without a speed."""

    def __post_init__(self) -> None:
        assert len(self.controls) == len(self.rungs) + 1, "every rung runs between two controls"

    @property
    def variance(self) -> float:
        """Variance of the log speed between runs of the same config; neighbouring controls differ by twice that."""
        logs = [math.log(control.middle) for control in self.controls]
        return sum((b - a) ** 2 for a, b in itertools.pairwise(logs)) / (2 * (len(logs) - 1))

    @property
    def freedom(self) -> float:
        """Degrees of freedom of :attr:`variance`: fewer than differences, as neighbouring ones share a control.

        By matching its first two moments under normal scatter (von Neumann et al., Annals of Mathematical
        Statistics 12, 1941): 1 for two controls, and two thirds of the differences for many.
        """
        count = len(self.controls)
        return 2 * (count - 1) ** 2 / (3 * count - 4)

    def over_control(self, rung: int) -> Difference | None:
        """Rung ``rung`` over the controls around it: a drift that is linear in time cancels."""
        return self._difference(_powers(rung), rung)

    def over_rung(self, rung: int, other: int) -> Difference | None:
        """Rung ``rung`` over rung ``other``, each relative to its own controls. A control that both share cancels."""
        powers = _powers(rung)
        for place, power in _powers(other).items():
            powers[place] = powers.get(place, 0.0) - power
        return self._difference(powers, rung, other)

    def control_around(self, rung: int) -> Estimate:
        """The control when ``rung`` was run: between its two runs, as wide as both intervals and the drift."""
        before, after = self.controls[rung : rung + 2]
        middle = math.sqrt(before.middle * after.middle)
        return Estimate(middle, min(before.low, after.low), max(before.high, after.high))

    def _difference(self, powers: Mapping[int, float], *rungs: int) -> Difference | None:
        """The product of the runs to these ``powers``, with their own intervals and the scatter between runs."""
        terms = [(self._run(place), power) for place, power in powers.items() if power]
        known = [(run, power) for run, power in terms if run is not None]
        if len(known) < len(terms):
            return None
        scatter = t_quantile(self.freedom) * math.sqrt(self.variance * sum(power**2 for _, power in known))
        width = max(self.control_around(rung).width for rung in rungs)
        return Difference(*power_product(known, log_error=scatter), control_width=width)

    def _run(self, place: int) -> Estimate | None:
        number, is_rung = divmod(place, 2)
        return self.rungs[number] if is_rung else self.controls[number]


def _powers(rung: int) -> dict[int, float]:
    """A rung over the geometric mean of the controls around it, by the runs' places in the session."""
    return {2 * rung: -0.5, 2 * rung + 1: 1.0, 2 * rung + 2: -0.5}
