"""Tokens per second with a 95% interval: the steady state, and when measuring may stop.

In: the seconds of every step. The first steps include compilation, cache warming and clock ramps, so they never count.
A speed above what the device can compute is no measurement: its kernels did not run, or its clock is wrong.
"""

import statistics
from collections.abc import Sequence

from infra.device.hardware import peak_flops
from train.config import Execution
from train.intervals import MIN_BATCHES, anytime_half_width, batch_means, median_interval, warmup_steps
from train.model_config import ModelSpec
from train.result import Throughput

FEWEST_STEPS = 3
"""The least number of steps after warm-up that make a measurement."""


def steady_state(step_seconds: Sequence[float], step_tokens: int) -> Throughput | None:
    """Throughput after warm-up, or None when fewer than three steps remain.

    The speed is that of the median batch of steps: a single disturbance by another process does not count, a recurring
    stall does. The interval is that of the median, from batch means. A step lasts from the end of one on the device to
    the end of the next, so that whatever the host does between them counts. On a GPU its own events are used, which
    agree with the wall clock except for how far the host runs ahead.
    """
    warmup = warmup_steps(step_seconds)
    steady = step_seconds[warmup:]
    if len(steady) < FEWEST_STEPS:
        return None
    middle, fast, slow = median_interval(batch_means(steady))
    fastest = min(steady)
    return Throughput(step_tokens / middle, step_tokens / slow, step_tokens / max(fast, fastest), len(steady), warmup)


def implausible_reason(speed: Throughput, model: ModelSpec, execution: Execution, workers: int, device: str) -> str:
    """Why ``speed`` cannot be that of ``config`` on ``device``; empty where it can, or where no peak is known.

    Only what must be computed is counted: half of attention, because it is causal. In 8 bits a GPU has twice the peak.
    """
    peak = peak_flops(device, execution.precision)
    if not peak:
        return ""
    reachable = peak * workers * (2 if execution.fp8 else 1)
    share = speed.tokens_per_second * model.min_flops_per_token / reachable
    if share <= 1:
        return ""
    return (
        f"{speed.tokens_per_second:,.0f} tokens/s would take {share:,.0%} of the peak of {device}, which is "
        "impossible: check the driver and the GPU with python -m infra.doctor"
    )


def median_batch_seconds(seconds: Sequence[float]) -> float:
    """Seconds of the median batch of steps, as the speed is that of one; 0 without any."""
    return statistics.median(batch_means(seconds)) if seconds else 0.0


def is_precise(step_seconds: Sequence[float], within: float) -> bool:
    """Whether the speed is known to ``within`` (0.005 is half a percent), so that measuring may stop.

    By the width of a confidence sequence over batches of steps. The batches grow with the run, so its guarantee is
    weaker than that of one over steps: checked after each of 3,000 independent steps, it was wrong in 7% of runs
    instead of 5%.
    """
    batches = batch_means(step_seconds[warmup_steps(step_seconds) :])
    if len(batches) < MIN_BATCHES:
        return False
    return anytime_half_width(batches) <= within * statistics.fmean(batches)
