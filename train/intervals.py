"""What a series of noisy timings allows to be said: where warm-up ends, an interval of the median, when to stop.

In: numbers measured one after another. Out: estimates with their uncertainty. Neighbouring steps of a
run resemble each other (clocks, temperature, other processes), so an interval that takes them for
independent is too narrow; means of long enough batches are independent in effect.
"""

import itertools
import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95
MOST_BATCHES, FEWEST_BATCHES = 30, 10
_CORRELATED = 0.2


def warmup_steps(step_seconds: Sequence[float]) -> int:
    """Steps before the speed has settled: the first place where two neighbouring windows agree, from step 1 on.

    Windows agree when their medians differ by no more than 1% or three standard errors of such a
    difference, taken from how much steps of the run's second half differ from the next. The first step,
    which compiles, never counts. A run that never settles gives up its first half, and its interval shows
    the rest.
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
    remain (the method of batch means with Fishman's rule, Management Science 24, 1978). It is never one
    step in a long run, so that a stall every fifty steps counts instead of being outvoted by a median.
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
    middle = statistics.fmean(values)
    apart = [value - middle for value in values]
    square = sum(a * a for a in apart)
    return sum(a * b for a, b in itertools.pairwise(apart)) / square if square else 0.0


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and its 95% interval (middle, low, high) from order statistics, free of any distribution.

    From Hahn and Meeker 1991, section 5.2. Fewer than six values cannot give 95% that way; their interval
    is Student's, which assumes a normal distribution. Raises ``ValueError`` for fewer than two values.
    """
    ordered, count = sorted(values), len(values)
    middle = statistics.median(ordered)
    if count < 6:
        reach = t_quantile(count - 1) * statistics.stdev(ordered) / math.sqrt(count)
        return middle, middle - reach, middle + reach
    tail, rank = 0.5**count, 0
    while tail + math.comb(count, rank + 1) * 0.5**count <= (1 - CONFIDENCE) / 2:
        rank += 1
        tail += math.comb(count, rank) * 0.5**count
    return middle, ordered[rank], ordered[count - 1 - rank]


def anytime_half_width(values: Sequence[float]) -> float:
    """Half width of a 95% confidence sequence for the mean: right at every moment, so one may stop by it.

    An ordinary interval watched until it is narrow enough is wrong far more often than 5%. This is the
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


def t_quantile(freedom: int) -> float:
    """Student's t for a two-sided 95% interval: exact for one and two degrees of freedom.

    From three on it is the expansion of Abramowitz and Stegun 26.7.5, within 0.2%. Raises ``ValueError``
    without a degree of freedom.
    """
    if freedom < 1:
        raise ValueError("an interval needs at least two values")
    p = (1 + CONFIDENCE) / 2
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = statistics.NormalDist().inv_cdf(p)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
