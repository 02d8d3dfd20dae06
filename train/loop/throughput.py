"""Tokens per second with a 95% interval: the steady state, and when measuring may stop.

In: the seconds of every step. The first steps hold compilation, cache warming and clock ramps, so they never count.
"""

import statistics
from collections.abc import Sequence

from train.intervals import FEWEST_BATCHES, anytime_half_width, batch_means, median_interval, warmup_steps
from train.result import Throughput

FEWEST_STEPS = 3
"""Steps after warm-up without which there is no speed to speak of."""


def steady_state(step_seconds: Sequence[float], step_tokens: int) -> Throughput | None:
    """Throughput after warm-up, or None when fewer than three steps remain.

    The speed is that of the median batch of steps: one disturbance by a neighbour is not the machine's speed, a
    stall that recurs is. The interval is the median's, from batch means. Steps last from the device's end of one to
    its end of the next, so that whatever the host does between them counts: on a GPU by its own events, which agree
    with the wall clock but for the distance at which the host runs ahead.
    """
    warmup = warmup_steps(step_seconds)
    steady = step_seconds[warmup:]
    if len(steady) < FEWEST_STEPS:
        return None
    middle, fast, slow = median_interval(batch_means(steady))
    fastest = min(steady)
    return Throughput(step_tokens / middle, step_tokens / slow, step_tokens / max(fast, fastest), len(steady), warmup)


def settled(step_seconds: Sequence[float], within: float) -> bool:
    """Whether the speed is known to ``within`` (0.005 is half a percent), so that measuring may stop.

    By the width of a confidence sequence over batches of steps. The batches grow with the run, so it does not hold
    as strictly as one over steps would: looked at after each of 3,000 independent steps, it has been wrong in 7% of
    runs and not in 5.
    """
    batches = batch_means(step_seconds[warmup_steps(step_seconds) :])
    if len(batches) < FEWEST_BATCHES:
        return False
    return anytime_half_width(batches) <= within * statistics.fmean(batches)
