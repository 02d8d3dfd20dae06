"""Statistics of noisy timings: the end of warm-up, intervals of speeds, their differences, confidence sequences.

A speed is an :class:`Estimate` everywhere: in lines, tables, files, MLflow and pictures. Whether two speeds differ is
decided by a :class:`Difference` everywhere: if the interval of their ratio excludes 1.

Neighboring steps of a run are correlated (clocks, temperature, other processes), so an interval that assumes
independence is too narrow. The means of batches that are long enough are nearly independent.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

CONFIDENCE = 0.95
"""Confidence level of all intervals."""
TARGET_BATCHES, MIN_BATCHES = 30, 10
"""Number of batches that :func:`batch_means` starts with, and the minimum to which it merges them."""
_MAX_AUTOCORRELATION = 0.2
"""Maximum lag-1 autocorrelation of batch means that count as uncorrelated."""


class Estimate(NamedTuple):
    """A quantity and its 95% interval; positive, except for differences."""

    middle: float
    """Estimated value of the quantity."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""

    @property
    def interval(self) -> str:
        """The interval as a text, such as ``1,200 to 1,260``."""
        return f"{self.low:,.0f} to {self.high:,.0f}"

    def __str__(self) -> str:
        return f"{self.middle:,.0f} (95% CI {self.interval})"


@dataclass(frozen=True)
class Difference:
    """A ratio of two speeds and its 95% interval, which decides whether they differ."""

    ratio: float
    """Ratio of the speeds."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""

    @classmethod
    def between(cls, speed: Estimate, control: Estimate) -> "Difference":
        """Compare two speeds by their intervals alone: they differ if the intervals do not touch.

        The ends are the extreme ratios of the two intervals. They are not combined by their squares, because the
        interval of a single run does not include the scatter between runs. Of pairs of identical runs on a busy CPU,
        the squares would call 28% different, and the extreme ratios 10% (``tests/benchmarks/records/aa-busy.json``).
        """
        return cls(speed.middle / control.middle, speed.low / control.high, speed.high / control.low)

    @property
    def is_significant(self) -> bool:
        """Whether the interval excludes equal speeds."""
        return not self.low <= 1 <= self.high

    @property
    def ratio_text(self) -> str:
        """The ratio as a text, such as ``x1.234``, in brackets if the difference is not significant."""
        return self._in_brackets_if_not_significant(self._format(self.ratio))

    @property
    def text(self) -> str:
        """The ratio and its interval, such as ``x1.234, x1.201 to x1.270``, in brackets as in :attr:`ratio_text`."""
        return self._in_brackets_if_not_significant(f"{self._format(self.ratio)}, {self._interval}")

    def __str__(self) -> str:
        significance = "" if self.is_significant else "; not significant"
        return f"{self._format(self.ratio)} (95% CI {self._interval}{significance})"

    @property
    def _interval(self) -> str:
        return f"{self._format(self.low)} to {self._format(self.high)}"

    def _in_brackets_if_not_significant(self, text: str) -> str:
        return text if self.is_significant else f"({text})"

    def _format(self, value: float) -> str:
        return f"x{value:.{3 if self.ratio < 2 else 2}f}"  # Below 2, a third decimal shows half a percent.


@dataclass(frozen=True)
class Scatter:
    """Scatter of the speeds of fresh processes with the same configuration, which usually exceeds that of their steps.

    Its causes are clocks, memory layout and other processes.
    """

    variance: float
    """Variance of the speed's logarithm between runs."""
    degrees_of_freedom: float
    """Degrees of freedom of the variance."""

    @classmethod
    def of(cls, repeated_speeds: Iterable[Sequence[float]]) -> "Scatter | None":
        """Estimate the scatter from the speeds of repeated runs, for each configuration; None without a repetition."""
        groups = [[math.log(speed) for speed in speeds] for speeds in repeated_speeds if len(speeds) > 1]
        degrees_of_freedom = sum(len(group) - 1 for group in groups)
        if not degrees_of_freedom:
            return None
        squares = sum((len(group) - 1) * statistics.variance(group) for group in groups)
        return cls(squares / degrees_of_freedom, degrees_of_freedom)

    def log_error(self, squared_powers: float) -> float:
        """Compute the half-width of the 95% interval of a product of runs, by the sum of their squared powers."""
        return t_quantile(self.degrees_of_freedom) * math.sqrt(self.variance * squared_powers)


def warmup_steps(step_seconds: Sequence[float]) -> int:
    """Count the steps before the speed is steady: up to the first step after which two adjacent windows agree.

    Two windows agree if their medians differ by at most 1%, or by at most three standard errors of such a difference,
    which are estimated from the differences between consecutive steps in the second half of the run. The first step,
    which compiles, is always warm-up. If the speed never becomes steady, the first half of the run is warm-up.
    """
    count = len(step_seconds)
    window = max(3, min(20, count // 8))
    max_steps = max(1, count // 2)
    second_half = step_seconds[count // 2 :]
    if count < 2 * window + 1:
        return min(1, count)
    # The factor 1.4826 converts a median deviation to a standard deviation, and sqrt(2) converts the deviation of a
    # difference to a value's deviation. The standard error of a median is 1.2533 times the standard error of a mean.
    deviation = 1.4826 * statistics.median(abs(b - a) for a, b in itertools.pairwise(second_half)) / math.sqrt(2)
    tolerance = max(0.01 * statistics.median(second_half), 3 * 1.2533 * deviation * math.sqrt(2 / window))
    for step in range(1, min(max_steps, count - 2 * window) + 1):
        first_median = statistics.median(step_seconds[step : step + window])
        second_median = statistics.median(step_seconds[step + window : step + 2 * window])
        if abs(first_median - second_median) <= tolerance:
            return step
    return max_steps


def batch_means(values: Sequence[float]) -> list[float]:
    """Compute the means of at most 59 consecutive batches, which are long enough to be uncorrelated.

    The batch size doubles while the lag-1 autocorrelation of the means is above 0.2 and ten batches would remain (the
    method of batch means with Fishman's rule, Management Science 24, 1978). In a long run a batch has several steps, so
    that a stall every fifty steps counts, which a median of steps would ignore.
    """
    size = max(1, len(values) // TARGET_BATCHES)
    means = _means(values, size)
    while len(values) // (2 * size) >= MIN_BATCHES and autocorrelation(means) > _MAX_AUTOCORRELATION:
        size *= 2
        means = _means(values, size)
    return means


def _means(values: Sequence[float], size: int) -> list[float]:
    whole = len(values) // size * size
    return [statistics.fmean(values[first : first + size]) for first in range(0, whole, size)]


def autocorrelation(values: Sequence[float]) -> float:
    """Compute the correlation of each value with the next one; 0 if all values are equal."""
    try:
        return statistics.correlation(values[:-1], values[1:])
    except statistics.StatisticsError:  # There are too few values, or all are equal.
        return 0.0


def median_interval(values: Sequence[float]) -> Estimate:
    """Compute the median and its 95% interval from order statistics, which assume no distribution.

    The method is in Hahn and Meeker 1991, section 5.2, and in scipy.stats.quantile_test, whose import would cost every
    run 1.4 s and 74 MB. Order statistics of fewer than six values cannot reach 95%, so their interval is Student's,
    which assumes a normal distribution. Raises ``ValueError`` for fewer than two values.
    """
    ordered, count = sorted(values), len(values)
    middle = statistics.median(ordered)
    if count < 6:
        half_width = t_quantile(count - 1) * statistics.stdev(ordered) / math.sqrt(count)
        return Estimate(middle, middle - half_width, middle + half_width)
    from scipy.special import bdtrik

    rank = int(bdtrik((1 - CONFIDENCE) / 2, count, 0.5))
    return Estimate(middle, ordered[rank], ordered[count - 1 - rank])


def power_product(terms: Sequence[tuple[Estimate, float]], *, log_error: float = 0.0) -> Estimate:
    """Compute the product of quantities, each raised to its power, with its interval.

    The ratio of two quantities is ``[(first, 1), (second, -1)]``. The method is MOVER, the method of variance estimates
    recovery (Zou and Donner, Statistics in Medicine 27, 2008), on logarithms, because speeds vary by fractions. The
    distance of the product's lower end is the root of the sum of squares of distances: of the lower ends of factors,
    and of the upper ends of divisors. Unlike Fieller's theorem and the delta method, it supports asymmetric intervals,
    such as those of medians, and always returns an interval. ``log_error`` is the half-width of an additional
    independent error of the logarithm.
    """
    middle = sum(power * math.log(value.middle) for value, power in terms)
    lower_squares = upper_squares = log_error**2
    for value, power in terms:
        lower, upper = math.log(value.middle / value.low), math.log(value.high / value.middle)
        if power < 0:
            lower, upper = upper, lower
        lower_squares += (power * lower) ** 2
        upper_squares += (power * upper) ** 2
    low, high = math.exp(middle - math.sqrt(lower_squares)), math.exp(middle + math.sqrt(upper_squares))
    return Estimate(math.exp(middle), low, high)


def mean_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Estimate the ratio of two means, which is not negative, from independent pairs, with its 95% interval.

    The interval is Fieller's (Journal of the Royal Statistical Society B 16, 1954), of all ratios r for which the mean
    of numerator - r x denominator can be zero. Its upper end is infinite if the mean denominator can be zero. Raises
    ``ValueError`` for fewer than two pairs.
    """
    top, bottom = statistics.fmean(numerators), statistics.fmean(denominators)
    squared_error = t_quantile(len(numerators) - 1) ** 2 / len(numerators)
    # The ratios are those with a r^2 - 2 b r + c <= 0.
    a = bottom**2 - squared_error * statistics.variance(denominators)
    b = top * bottom - squared_error * statistics.covariance(numerators, denominators)
    c = top**2 - squared_error * statistics.variance(numerators)
    middle = max(0.0, top) / bottom if bottom > 0 else math.inf
    discriminant = b**2 - a * c
    if a <= 0 or bottom <= 0:
        low = (b - math.sqrt(discriminant)) / a if a < 0 < c and discriminant > 0 else 0.0
        return Estimate(middle, low, math.inf)
    root = math.sqrt(discriminant)
    return Estimate(middle, max(0.0, (b - root) / a), max(0.0, (b + root) / a))


def pool(runs: Sequence[Estimate], scatter: Scatter | None) -> Estimate:
    """Compute the speed of a configuration from its ``runs`` in fresh processes.

    The interval of a single run is the run's own, by its steps. Of several runs, the speed is the geometric mean. Its
    interval combines the intervals of the runs, which become narrower together, with the ``scatter`` between runs,
    which their steps do not show. The scatter is estimated from all repeated configurations, because the scatter of
    two or three runs of one of them says little.
    """
    if len(runs) == 1:
        return runs[0]
    log_error = scatter.log_error(1 / len(runs)) if scatter else 0.0
    return power_product([(run, 1 / len(runs)) for run in runs], log_error=log_error)


def anytime_half_width(values: Sequence[float]) -> float:
    """Compute the half-width of a 95% confidence sequence for the mean, by which a measurement can be stopped.

    An ordinary interval that is checked until it is narrow enough is wrong far more often than 5%. A confidence
    sequence is valid at all times. This is the asymptotic sequence of Waudby-Smith et al. (arXiv 2103.06476, theorem
    2.2), which is narrowest at 30 values.
    """
    count = len(values)
    if count < 2:
        return math.inf
    alpha = 1 - CONFIDENCE
    rho2 = (-2 * math.log(alpha) + math.log(1 - 2 * math.log(alpha))) / TARGET_BATCHES
    spread = count * rho2 + 1
    width = math.sqrt(2 * spread / (count**2 * rho2) * math.log(math.sqrt(spread) / alpha))
    return statistics.stdev(values) * width


def t_quantile(degrees_of_freedom: float) -> float:
    """Compute Student's t for a two-sided 95% interval. Raises ``ValueError`` below one degree of freedom."""
    if degrees_of_freedom < 1:
        raise ValueError("an interval needs at least two values")
    from scipy.special import stdtrit

    return float(stdtrit(degrees_of_freedom, (1 + CONFIDENCE) / 2))
