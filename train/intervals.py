"""Statistics of noisy timings: where warm-up ends, a confidence interval of the median, when to stop measuring.

Neighbouring steps of a run are correlated (clocks, temperature, other processes), so an interval that assumes
independence is too narrow; the means of batches that are long enough are nearly independent.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
MOST_BATCHES, FEWEST_BATCHES = 30, 10
_CORRELATED = 0.2

WIDEST_CONTROL = 0.25
"""Widest 95% interval of a control, as a fraction of its speed, from which a conclusion is drawn."""


class Estimate(NamedTuple):
    """A positive quantity and its 95% interval."""

    middle: float
    low: float
    high: float

    @property
    def width(self) -> float:
        """Width of the whole interval, as a fraction of the quantity."""
        return (self.high - self.low) / self.middle

    def __str__(self) -> str:
        return f"{self.middle:,.0f} (95% CI {self.low:,.0f} to {self.high:,.0f})"


def warmup_steps(step_seconds: Sequence[float]) -> int:
    """Steps before the speed is steady: up to the first place, from step 1 on, where two neighbouring windows agree.

    Windows agree when their medians differ by no more than 1% or three standard errors of such a difference, estimated
    from the differences between consecutive steps in the run's second half. The first step, which compiles, never
    counts. A run that never becomes steady loses its first half.
    """
    count = len(step_seconds)
    window = max(3, min(20, count // 8))
    latest = max(1, count // 2)
    later = step_seconds[count // 2 :]
    if count < 2 * window + 1:
        return min(1, count)
    # 1.4826 turns a median deviation into a standard deviation, sqrt(2) a difference's into one value's;
    # 1.2533 is the standard error of a median in units of a mean's.
    scatter = 1.4826 * statistics.median(abs(b - a) for a, b in itertools.pairwise(later)) / math.sqrt(2)
    tolerance = max(0.01 * statistics.median(later), 3 * 1.2533 * scatter * math.sqrt(2 / window))
    for start in range(1, min(latest, count - 2 * window) + 1):
        first = statistics.median(step_seconds[start : start + window])
        second = statistics.median(step_seconds[start + window : start + 2 * window])
        if abs(first - second) <= tolerance:
            return start
    return latest


def batch_means(values: Sequence[float]) -> list[float]:
    """Means of consecutive batches, long enough that neighbours are uncorrelated, at most 59 of them.

    The batch doubles while the lag-1 autocorrelation of the means is above 0.2 and ten batches would
    remain (the method of batch means with Fishman's rule, Management Science 24, 1978). In a long run it is more than
    one step, so that a stall every fifty steps counts, which a median of steps would ignore.
    """
    size = max(1, len(values) // MOST_BATCHES)
    means = _means(values, size)
    while len(values) // (2 * size) >= FEWEST_BATCHES and autocorrelation(means) > _CORRELATED:
        size *= 2
        means = _means(values, size)
    return means


def _means(values: Sequence[float], size: int) -> list[float]:
    whole = len(values) // size * size
    return [statistics.fmean(values[first : first + size]) for first in range(0, whole, size)]


def autocorrelation(values: Sequence[float]) -> float:
    """Correlation of each value with the next; 0 when nothing varies."""
    try:
        return statistics.correlation(values[:-1], values[1:])
    except statistics.StatisticsError:  # too few values, or all the same
        return 0.0


def median_interval(values: Sequence[float]) -> Estimate:
    """The median and its 95% interval from order statistics, free of any distribution.

    From Hahn and Meeker 1991, section 5.2: as scipy.stats.quantile_test has it, whose import would cost every run
    1.4 s and 74 MB. Fewer than six values cannot give 95% that way; their interval is Student's, which assumes a
    normal distribution. Raises ``ValueError`` for fewer than two values.
    """
    ordered, count = sorted(values), len(values)
    middle = statistics.median(ordered)
    if count < 6:
        reach = t_quantile(count - 1) * statistics.stdev(ordered) / math.sqrt(count)
        return Estimate(middle, middle - reach, middle + reach)
    from scipy.special import bdtrik

    rank = int(bdtrik((1 - CONFIDENCE) / 2, count, 0.5))
    return Estimate(middle, ordered[rank], ordered[count - 1 - rank])


def power_product(terms: Sequence[tuple[Estimate, float]], *, log_error: float = 0.0) -> Estimate:
    """The product of quantities, each raised to its power, with the interval that their intervals make.

    A ratio is ``[(first, 1), (second, -1)]``. The lower ends of what multiplies and the upper ends of what divides
    lie at distances, in logarithms, whose root of the sum of squares is the distance of the lower end of the product:
    MOVER, the method of variance estimates recovery (Zou and Donner, Statistics in Medicine 27, 2008), on the logarithm
    because speeds vary by fractions. Unlike Fieller's theorem or the delta method it takes asymmetric intervals as
    they are, which those of medians are, and always gives an interval. ``log_error`` is the half-width of a further
    independent error of the logarithm.
    """
    middle = sum(power * math.log(value.middle) for value, power in terms)
    down = up = log_error**2
    for value, power in terms:
        below, above = math.log(value.middle / value.low), math.log(value.high / value.middle)
        if power < 0:
            below, above = above, below
        down += (power * below) ** 2
        up += (power * above) ** 2
    return Estimate(math.exp(middle), math.exp(middle - math.sqrt(down)), math.exp(middle + math.sqrt(up)))


def anytime_half_width(values: Sequence[float]) -> float:
    """Half-width of a 95% confidence sequence for the mean: valid at every moment, so that one may stop by it.

    An ordinary interval that is watched until it is narrow enough is wrong far more often than 5%. This is the
    asymptotic sequence of Waudby-Smith et al. (arXiv 2103.06476, theorem 2.2), narrowest at 30 values.
    """
    count = len(values)
    if count < 2:
        return math.inf
    alpha = 1 - CONFIDENCE
    rho2 = (-2 * math.log(alpha) + math.log(1 - 2 * math.log(alpha))) / MOST_BATCHES
    spread = count * rho2 + 1
    width = math.sqrt(2 * spread / (count**2 * rho2) * math.log(math.sqrt(spread) / alpha))
    return statistics.stdev(values) * width


def t_quantile(freedom: float) -> float:
    """Student's t for a two-sided 95% interval. Raises ``ValueError`` without a degree of freedom."""
    if freedom < 1:
        raise ValueError("an interval needs at least two values")
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + CONFIDENCE) / 2))
