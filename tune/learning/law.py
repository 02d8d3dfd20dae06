"""Extrapolation of held-out losses over training time, by the law L = E + A t^-a.

The losses of a candidate are those at the ends of decay branches at rungs, by seed. The interval holds all laws that
are compatible with them at the scatter of seeds. The scatter is that of all candidates, because the scatter of two or
three seeds of one of them says little, pooled with an assumed one.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from train.estimate.power_law import PowerLaw, PowerLawDifference
from train.intervals import Estimate, Scatter

Curves = Mapping[int, Sequence[tuple[float, float]]]
"""Rungs of a candidate by seed: seconds of the final run, and the held-out loss after its decay."""

SEED_DEVIATION = 0.003
"""Assumed standard deviation of a run's loss between seeds, as a fraction of the loss."""
LAW_DEVIATION = 0.0015
"""Assumed standard deviation of expected losses, or of their differences, from the law, as a fraction of the loss.

More seeds do not make it smaller, because loss curves are only nearly power laws."""
ASSUMED_DEGREES_OF_FREEDOM = 4
"""Degrees of freedom of the assumed deviation: it counts as much as five seeds of one candidate."""
TYPICAL_EXPONENT = 0.3
"""Typical exponent of the law; the published one of loss over tokens is 0.28 (arXiv 2203.15556)."""
MIN_RUNGS = 2
"""Number of rungs that a prediction needs. Two determine it for each exponent, so that its interval is wide."""
MAX_RATIO = 1024
"""Ratio to the longest or shortest rung up to which the time to a loss is searched."""


def seed_scatter(candidates: Iterable[Curves]) -> Scatter | None:
    """Estimate the scatter of losses between seeds from all candidates; None if no candidate has two seeds.

    The rungs of a seed share a trunk, so that a seed counts once for the degrees of freedom, whatever its rungs.
    """
    groups: list[Sequence[float]] = []
    degrees_of_freedom = 0
    for curves in candidates:
        repeated = [losses for losses in _values_by_time(curves).values() if len(losses) > 1]
        groups += repeated
        degrees_of_freedom += max(map(len, repeated), default=1) - 1
    scatter = Scatter.of(groups)
    return Scatter(scatter.variance, degrees_of_freedom) if scatter else None


@dataclass(frozen=True)
class LearningLaw:
    """The law of one candidate's losses over training time."""

    curves: Curves
    """Rungs of the candidate by seed."""
    scatter: Scatter | None = None
    """Scatter between seeds, of all candidates; None without repeated seeds."""

    def loss(self, seconds: float) -> Estimate | None:
        """Return the held-out loss to expect of a run of this time; None with less than two rungs, except at the rung.

        The 95% interval combines that of the law, another change of the slope, and the scatter of a single run.
        """
        if not self._laws:
            if seconds not in self._rungs:
                return None
            measured = statistics.fmean(self._rungs[seconds])
            return Estimate(measured, measured - self._run_error, measured + self._run_error)
        losses = [law.at(seconds) for law in self._laws]
        middle = losses[0].middle
        low, high = min(loss.low for loss in losses), max(loss.high for loss in losses)
        low -= self._slope_change * max(0.0, math.log(self.extrapolation(seconds)))
        low = middle - math.hypot(middle - low, self._run_error)
        return Estimate(middle, max(0.0, low), middle + math.hypot(high - middle, self._run_error))

    def seconds(self, loss: float) -> Estimate | None:
        """Return the time at which a run reaches ``loss``; None with less than two rungs, or if no end is reached.

        The ends of the 95% interval are the times at which those of :meth:`loss` reach it. An end that is not reached
        within a thousand times the longest rung is infinite.
        """
        if not self._laws:
            return None
        shortest, longest = min(self._rungs), max(self._rungs)

        def reached(end: int) -> float:
            return first_time(
                lambda seconds: self._end(seconds, end) <= loss, shortest / MAX_RATIO, longest * MAX_RATIO
            )

        middle, low, high = map(reached, range(3))
        return None if math.isinf(low) else Estimate(middle, low, high)

    @property
    def has_phases(self) -> bool:
        """Whether the loss has fallen ever faster between some rungs, by at least half of what seeds scatter."""
        scatter, times, slopes = _pooled(SEED_DEVIATION**2, self.scatter), list(self._rungs), _slopes(self._rungs)
        deviations = [
            statistics.fmean(losses) * math.sqrt(scatter.variance / len(losses)) for losses in self._rungs.values()
        ]
        for rung, (slope, next_slope) in enumerate(itertools.pairwise(slopes), 1):
            first, last = math.log(times[rung] / times[rung - 1]), math.log(times[rung + 1] / times[rung])
            terms = (
                deviations[rung - 1] / first,
                deviations[rung] * (1 / first + 1 / last),
                deviations[rung + 1] / last,
            )
            if slope - next_slope > math.hypot(*terms) / 2:
                return True
        return False

    def extrapolation(self, seconds: float) -> float:
        """Return the ratio of ``seconds`` to the longest rung."""
        return seconds / max(self._rungs)

    def _end(self, seconds: float, end: int) -> float:
        loss = self.loss(seconds)
        assert loss is not None, "a law was fitted"
        return loss[end]

    @cached_property
    def _rungs(self) -> Mapping[float, Sequence[float]]:
        return _values_by_time(self.curves)

    @cached_property
    def _laws(self) -> Sequence[PowerLaw]:
        """The law of the last rungs, and that of all if these do not follow one law; none with less than two rungs.

        A model learns in phases: first frequencies of tokens, then pairs, then to copy. If the rungs do not follow one
        law, others may not either, so that the interval has the laws of all rungs, too, whose residuals make them wide.
        """
        if len(self._rungs) < MIN_RUNGS:
            return []
        last = _last_rungs(self._rungs)
        return [self._fit(last), self._fit(self._rungs)] if len(last) < len(self._rungs) else [self._fit(last)]

    def _fit(self, rungs: Mapping[float, Sequence[float]]) -> PowerLaw:
        scatter = _pooled(SEED_DEVIATION**2, self.scatter)
        means, deviations = list(map(statistics.fmean, rungs.values())), _deviations(rungs, scatter)
        return PowerLaw(list(rungs), means, deviations, scatter.degrees_of_freedom, TYPICAL_EXPONENT)

    @cached_property
    def _slope_change(self) -> float:
        """By how much the fall of the loss per logarithm of time changed at the rung before the last one.

        It may change as much again towards a faster fall, because a model learns in phases, which no law does: a fall
        that has slowed down may recover when the model learns to copy.
        """
        slopes = _slopes(self._rungs)
        return abs(slopes[-2] - slopes[-1]) if len(slopes) > 1 else 0.0

    @cached_property
    def _run_error(self) -> float:
        """Half-width of the 95% interval of a single run's loss, at the level of the longest rung."""
        scatter = _pooled(SEED_DEVIATION**2, self.scatter)
        return scatter.log_error(1) * statistics.fmean(self._rungs[max(self._rungs)])


def paired_ratios(first: Curves, second: Curves) -> Curves:
    """Return the ratios of two candidates' losses at the rungs that both have with the same seed.

    :func:`seed_scatter` of them is the scatter of differences, in which what seeds have in common cancels out.
    """
    return _paired(first, second, lambda loss, other: loss / other)


def loss_difference(
    first: Curves, second: Curves, seconds: float, ratio_scatter: Scatter | None = None
) -> Estimate | None:
    """Return the expected loss of ``first`` at ``seconds`` minus that of ``second``, with its 95% interval.

    The difference of the laws is fitted to the differences at the rungs that both candidates have with the same seed;
    None with less than two. At such a rung it is the measured one. ``ratio_scatter`` is the scatter between seeds of
    :func:`paired_ratios`, of all pairs. If the loss of a candidate has fallen ever faster, the interval also holds the
    difference of their own predictions.
    """
    differences = _values_by_time(_paired(first, second, lambda loss, other: loss - other))
    levels = _values_by_time(_paired(first, second, lambda loss, other: (loss + other) / 2))
    difference_scatter = _pooled(2 * SEED_DEVIATION**2, ratio_scatter)
    if seconds in differences:
        measured, level = statistics.fmean(differences[seconds]), statistics.fmean(levels[seconds])
        error = level * difference_scatter.log_error(1 / len(differences[seconds]))
        return Estimate(measured, measured - error, measured + error)
    if len(differences) < MIN_RUNGS:
        return None
    law = PowerLawDifference(
        positions=list(differences),
        differences=list(map(statistics.fmean, differences.values())),
        means=list(map(statistics.fmean, levels.values())),
        deviations=_deviations(levels, difference_scatter),
        degrees_of_freedom=difference_scatter.degrees_of_freedom,
    )
    difference = law.at(seconds)
    scatter = seed_scatter([first, second])
    laws = [LearningLaw(curves, scatter) for curves in (first, second)]
    if not any(law.has_phases for law in laws):
        return difference
    loss, other = (law.loss(seconds) for law in laws)
    assert loss is not None, "it has the rungs of the pairs"
    assert other is not None, "it has the rungs of the pairs"
    low = loss.middle - other.middle - math.hypot(loss.middle - loss.low, other.high - other.middle)
    high = loss.middle - other.middle + math.hypot(loss.high - loss.middle, other.middle - other.low)
    return Estimate(difference.middle, min(low, difference.low), max(high, difference.high))


def _deviations(losses: Mapping[float, Sequence[float]], scatter: Scatter) -> list[float]:
    """Return the standard deviation of the mean loss of each rung, or of a mean difference at this level."""
    variances = [LAW_DEVIATION**2 + scatter.variance / len(of_seeds) for of_seeds in losses.values()]
    levels = map(statistics.fmean, losses.values())
    return [level * math.sqrt(variance) for level, variance in zip(levels, variances, strict=True)]


def _last_rungs(rungs: Mapping[float, Sequence[float]]) -> Mapping[float, Sequence[float]]:
    """Return the last rungs, at least two, along which the loss falls ever more slowly, as by a power law."""
    slopes = _slopes(rungs)
    first = next((n for n in range(len(slopes) - 1, 0, -1) if slopes[n] <= slopes[n - 1]), 0)
    return dict(list(rungs.items())[first:])


def _slopes(rungs: Mapping[float, Sequence[float]]) -> list[float]:
    """Return the change of the mean loss per logarithm of time between rungs."""
    points = [(math.log(time), statistics.fmean(losses)) for time, losses in rungs.items()]
    return [(end[1] - start[1]) / (end[0] - start[0]) for start, end in itertools.pairwise(points)]


def _pooled(assumed_variance: float, scatter: Scatter | None) -> Scatter:
    """Pool an assumed variance with an observed scatter."""
    if scatter is None:
        return Scatter(assumed_variance, ASSUMED_DEGREES_OF_FREEDOM)
    total = ASSUMED_DEGREES_OF_FREEDOM + scatter.degrees_of_freedom
    squares = ASSUMED_DEGREES_OF_FREEDOM * assumed_variance + scatter.degrees_of_freedom * scatter.variance
    return Scatter(squares / total, total)


def _values_by_time(curves: Curves) -> dict[float, list[float]]:
    """Return the values of all seeds by time, in the order of time."""
    values: dict[float, list[float]] = {}
    for time, value in sorted(point for curve in curves.values() for point in curve):
        values.setdefault(time, []).append(value)
    return values


def _paired(first: Curves, second: Curves, combine: Callable[[float, float], float]) -> Curves:
    """Combine the losses of two candidates at the rungs that both have with the same seed."""
    return {
        seed: [(time, combine(loss, others[time])) for time, loss in curve if time in others]
        for seed, curve in first.items()
        if (others := dict(second.get(seed, ())))
    }


def first_time(is_reached: Callable[[float], bool], shortest: float, longest: float) -> float:
    """Return the first time at which a condition holds that holds ever after, to a relative error of 1e-6."""
    if not is_reached(longest):
        return math.inf
    low, high = math.log(shortest), math.log(longest)
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if is_reached(math.exp(middle)) else (middle, high)
    return math.exp(high)
