"""Comparison of rungs that separates their speedup from the machine's drift. The suite ``aa`` tests its verdicts.

Runs of the same config usually vary more than the steps within a run (clocks, memory layout, other processes), so this
variance is estimated from the controls. The intervals of the runs are added to it, because two controls with equal
speeds do not show how precise each measurement is.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from infra.facts import Fact
from train.intervals import Difference, Estimate, Scatter, power_product


def difference_fact(name: str, difference: Difference, text: str) -> Fact:
    """Create the fact of a speedup with its ``text``, the metric ``name`` and the ends of its interval."""
    return Fact(text, {name: difference.ratio, f"{name}_low": difference.low, f"{name}_high": difference.high})


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
    def scatter(self) -> Scatter:
        """Scatter between runs of the same config: half the mean squared difference of adjacent controls.

        A slow drift of the machine hardly adds to it. The degrees of freedom are fewer than the differences, because
        adjacent ones share a control. They match the first two moments of the variance under a normal distribution
        (von Neumann et al., Annals of Mathematical Statistics 12, 1941): 1 for two controls, and two thirds of the
        number of differences for many.
        """
        logs = [math.log(control.middle) for control in self.controls]
        count = len(logs)
        variance = sum((b - a) ** 2 for a, b in itertools.pairwise(logs)) / (2 * (count - 1))
        return Scatter(variance, 2 * (count - 1) ** 2 / (3 * count - 4))

    def over_control(self, rung: int) -> Difference | None:
        """Compute the speedup of a rung over the controls around it; a drift that is linear in time cancels."""
        return self._difference(_powers(rung))

    def over_rung(self, rung: int, other: int) -> Difference | None:
        """Compute the speedup of a rung over another, each relative to its controls; a shared control cancels."""
        powers = _powers(rung)
        for position, power in _powers(other).items():
            powers[position] = powers.get(position, 0.0) - power
        return self._difference(powers)

    def _difference(self, powers: Mapping[int, float]) -> Difference | None:
        """Compute the product of the runs' speeds to these ``powers``, with their intervals and the scatter."""
        factors = [(self._run(position), power) for position, power in powers.items() if power]
        speeds = [(run, power) for run, power in factors if run is not None]
        if len(speeds) < len(factors):
            return None
        log_error = self.scatter.log_error(sum(power**2 for _, power in speeds))
        return Difference(*power_product(speeds, log_error=log_error))

    def _run(self, position: int) -> Estimate | None:
        number, is_rung = divmod(position, 2)
        return self.rungs[number] if is_rung else self.controls[number]


def _powers(rung: int) -> dict[int, float]:
    """Return the powers of a rung and the controls around it in its speedup, by the position of their runs in the
    ladder."""
    return {2 * rung: -0.5, 2 * rung + 1: 1.0, 2 * rung + 2: -0.5}
