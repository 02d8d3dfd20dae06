"""Predicted peak memory of a step, and the largest batch that fits.

Memory that cannot be predicted (segment rounding, library workspaces, the context) is learned from probes: see
:func:`fit_to_probes`.
"""

import math
import statistics
from bisect import bisect
from collections.abc import Sequence

from train.config import Execution, Step
from train.estimate.breakdown import MemoryBreakdown
from train.estimate.estimates import estimates_of

MARGIN = {"cuda": 0.03, "cpu": 0.05}
"""Safety margin as a fraction of the predicted peak. On a GPU it is the largest error of the predicted reserved memory
(tests/benchmarks/records/memory-cuda.json)."""
FIXED_SEGMENTS = 0.2
"""Safety margin on a GPU without expandable segments, whose fragmentation has no formula."""


def peak_if_known(step: Step) -> MemoryBreakdown | None:
    """Return :func:`predict_peak` if it needs no measurement; None for a model whose memory must be measured first."""
    return predict_peak(step) if estimates_of(step.model).is_memory_known(step) else None


def predict_peak(step: Step) -> MemoryBreakdown:
    """Return the peak of ``step`` on one worker by part.

    Formulas predict it without using a device. If the model has no formulas, it is measured, which takes seconds once
    for all micro-batches.
    """
    return estimates_of(step.model).predict_peak(step)


def fit_to_probes(predicted: float, probes: Sequence[tuple[float, float]]) -> float:
    """Return ``predicted`` bytes, corrected by ``probes``: (predicted, measured) bytes of runs with other
    micro-batches.

    With two or more probes the correction is a linear fit by least squares, because rounding and workspaces are affine
    in the micro-batch. With one probe it is an offset; without probes there is no correction.
    """
    if not probes:
        return predicted
    sizes, measured = zip(*probes, strict=True)
    if len(set(sizes)) == 1:
        return predicted + statistics.fmean(measured) - sizes[0]
    slope, intercept = statistics.linear_regression(sizes, measured)
    return intercept + slope * predicted


def peak_with_margin(step: Step) -> int:
    """Return the predicted peak bytes of the process of ``step``, with a safety margin."""
    peak = predict_peak(step)
    return peak.total + round(margin(step.execution) * peak.reserved)


def fits(step: Step, memory: int) -> bool:
    """Return whether ``step`` is predicted to need at most ``memory`` bytes with the margin.

    The memory of a model without formulas is only measured if a generous bound on it exceeds ``memory``.
    """
    estimates = estimates_of(step.model)
    is_small = not estimates.is_memory_known(step) and estimates.peak_bound(step) <= memory
    return is_small or peak_with_margin(step) <= memory


def margin(execution: Execution) -> float:
    """Return the safety margin of a predicted peak, as a fraction of the reserved memory."""
    has_fixed_segments = execution.device == "cuda" and execution.allocator in ("default", "split")
    return FIXED_SEGMENTS if has_fixed_segments else MARGIN[execution.device]


def largest_unconstrained_micro_batch(step: Step, limit: int) -> int:
    """Return the largest micro-batch that is predicted to need at most ``limit`` bytes, ignoring the global batch.

    The accumulation stays. 0 if not even one sequence fits.
    """

    unit = step.execution.loss_chunks // math.gcd(step.execution.loss_chunks, step.model.context_length)

    def is_too_large(units: int) -> bool:
        size = units * unit
        batch = size * step.batch.accumulation * step.batch.workers
        return peak_with_margin(step.replace(micro_batch=size, global_batch=batch)) > limit

    return unit * bisect(range(1, 2**16), False, key=is_too_large)
