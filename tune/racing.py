"""Stop a trial as soon as it cannot win, or when measuring on would tell nothing more.

In: the seconds of each step as they come, and the bar that a winner must reach. Out: a verdict. It rests
on a confidence sequence, which is right at every moment at once: an ordinary interval that is looked at
after each step stops good trials by chance.
"""

import statistics
from collections.abc import Sequence

from train.intervals import anytime_half_width, batch_means
from train.measure import warmup_steps

FEWEST = 5
"""Steps after warm-up before a trial is judged: the deviation of fewer is too often far below the truth."""


def verdict(step_seconds: Sequence[float], *, bar_seconds: float | None, precision: float) -> str | None:
    """Why the trial should end now, ``cannot win`` or ``precise``; None to go on.

    ``bar_seconds`` is the time of a step that a winner stays below; ``precision`` the half-width of the
    interval, as a fraction, that is good enough.
    """
    steady = step_seconds[warmup_steps(step_seconds) :]
    if len(steady) < FEWEST:
        return None
    batches = batch_means(steady)
    middle, half = statistics.fmean(batches), anytime_half_width(batches)
    if bar_seconds is not None and middle - half > bar_seconds:
        return "cannot win"
    return "precise" if half <= precision * middle else None
