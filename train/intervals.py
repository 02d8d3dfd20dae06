"""Statistics of noisy timings: the end of warm-up, confidence intervals of medians and ratios, confidence sequences.

Neighboring steps of a run are correlated (clocks, temperature, other processes), so an interval that assumes
independence is too narrow. The means of batches that are long enough are nearly independent.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
"""Confidence level of all intervals."""
TARGET_BATCHES, MIN_BATCHES = 30, 10
"""Number of batches that :func:`batch_means` starts with, and the minimum to which it merges them."""
_MAX_AUTOCORRELATION = 0.2
"""Maximum lag-1 autocorrelation of batch means that count as uncorrelated."""

MAX_CONTROL_WIDTH = 0.25
"""Maximum width of a control's 95% interval, as a fraction of its speed, for a conclusion to be drawn."""


class Estimate(NamedTuple):
    """A positive quantity and its 95% interval."""

    middle: float
    """Estimated value of the quantity."""
    low: float
    """Lower end of the interval."""
    high: float
    """Upper end of the interval."""

    @property
    def width(self) -> float:
        """Width of the whole interval, as a fraction of the estimated value."""
        return (self.high - self.low) / self.middle

    def __str__(self) -> str:
        return f"{self.middle:,.0f} (95% CI {self.low:,.0f} to {self.high:,.0f})"


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
