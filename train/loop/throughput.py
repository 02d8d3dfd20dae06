"""Tokens per second with a 95% interval: the steady state, and when measuring may stop.

The input is the seconds of every step. The first steps include compilation, cache warming and clock ramps, so they
never count. A speed that exceeds the device's peak FLOP/s is not a measurement: kernels did not run, or the clock is
wrong.
"""

import statistics
from collections.abc import Sequence

from infra.device.gpu_models import peak_flops
from train.config import Execution
from train.intervals import MIN_BATCHES, anytime_half_width, batch_means, median_interval, warmup_steps
from train.model_config import ModelSpec
from train.result import Throughput

MIN_STEADY_STEPS = 3
"""Smallest number of steps after warm-up from which a speed is measured."""


def steady_state(step_seconds: Sequence[float], step_tokens: int) -> Throughput | None:
    """Return the throughput after warm-up, or None when fewer than three steps remain.

    The speed is the median batch's: a single disturbance by another process does not count, a recurring stall does.
    The interval is the median's, from batch means. A step lasts from the end of the previous step on the device to its
    own end, so the host's work between steps counts. On a GPU the times are from CUDA events, which agree with the wall
    clock except for the host's lead over the device.
    """
    warmup = warmup_steps(step_seconds)
    steady = step_seconds[warmup:]
    if len(steady) < MIN_STEADY_STEPS:
        return None
    middle, fast, slow = median_interval(batch_means(steady))
    fastest = min(steady)
    return Throughput(step_tokens / middle, step_tokens / slow, step_tokens / max(fast, fastest), len(steady), warmup)


def implausible_reason(speed: Throughput, model: ModelSpec, execution: Execution, workers: int, device: str) -> str:
    """Return the reason why ``device`` cannot reach ``speed``; empty if it can, or if its peak FLOP/s are not known.

    Only the necessary FLOP are counted, which include half of attention, because it is causal. A GPU's peak with 8-bit
    matrix products is twice as high.
    """
    peak = peak_flops(device, execution.precision)
    if not peak:
        return ""
    reachable = peak * workers * (2 if execution.fp8 else 1)
    share = speed.tokens_per_second * model.min_flops_per_token / reachable
    if share <= 1:
        return ""
    return (
        f"{speed.tokens_per_second:,.0f} tokens/s would need {share:,.0%} of the peak FLOP/s of {device}, so the "
        "measurement is invalid. Check the driver and the GPU with 'python -m infra.doctor'"
    )


def median_batch_seconds(seconds: Sequence[float]) -> float:
    """Return the seconds of the median batch of steps, on which the reported speed is based too; 0 without steps."""
    return statistics.median(batch_means(seconds)) if seconds else 0.0


def is_precise(step_seconds: Sequence[float], within: float) -> bool:
    """Return whether the speed is measured to within ``within`` (0.005 is half a percent), so that measuring may stop.

    The criterion is the width of a confidence sequence over batches of steps. The batches grow with the run, so the
    guarantee is weaker than for a sequence over steps: checked after each of 3,000 independent steps, it was wrong in
    7% of runs instead of 5%.
    """
    batches = batch_means(step_seconds[warmup_steps(step_seconds) :])
    if len(batches) < MIN_BATCHES:
        return False
    return anytime_half_width(batches) <= within * statistics.fmean(batches)


def step_samples(
    micro_batches: Sequence[Sequence[float]], optimizer_seconds: Sequence[float], workers: int
) -> list[float]:
    """Return the seconds of a step from those of each of its micro-batches, by step; empty if none were timed.

    A step lasts as long as its micro-batches and the optimizer. With several workers the last micro-batch also
    exchanges the gradients. It is no sample then, and the additional time that it takes is added.
    """
    samples: list[float] = []
    other_work: list[float] = []
    accumulation = 1
    for seconds, optimizer in zip(micro_batches, optimizer_seconds, strict=True):
        if len(seconds) < 2:
            continue
        accumulation = len(seconds)
        alike = seconds if workers == 1 else seconds[:-1]
        exchange = 0.0 if workers == 1 else max(0.0, seconds[-1] - statistics.median(alike[1:] or alike))
        samples += alike
        other_work.append(optimizer + exchange)
    return [accumulation * seconds + statistics.median(other_work) for seconds in samples]
