"""Speed with its uncertainty: marks on the device's own clock, the steady state, FLOPs and MFU.

In: the seconds of every step. Out: tokens per second with a 95% interval. The first steps hold
compilation, cache warming and clock ramps, so they never count.
"""

import math
import statistics
import time
from typing import Any

import torch

from train.config import ModelConfig
from train.result import Throughput

Mark = Any
"""A moment on the device's timeline: a CUDA event, or seconds of the host's clock on the CPU."""


def mark(device: torch.device) -> Mark:
    """This moment in the device's work, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def wait_for(moment: Mark) -> None:
    """Block until the device has reached ``moment``."""
    if isinstance(moment, torch.cuda.Event):
        moment.synchronize()


def seconds_between(first: Mark, last: Mark) -> float:
    """Seconds from ``first`` to ``last``; both must have been reached."""
    return first.elapsed_time(last) / 1000 if isinstance(first, torch.cuda.Event) else last - first


def steady_state(step_seconds: list[float], step_tokens: int) -> Throughput | None:
    """Throughput after warm-up, or None when fewer than three steps remain.

    Warm-up is a tenth of the steps, at least one and at most twenty. The speed is the median step's,
    since one slow step (a page-in, a neighbour) is not the machine's speed; its interval is the
    distribution-free one for a median, from order statistics (Hahn and Meeker 1991, section 5.2).
    """
    warmup = max(1, min(20, len(step_seconds) // 10))
    steady = sorted(step_seconds[warmup:])
    count = len(steady)
    if count < 3:
        return None
    reach = 1.96 * math.sqrt(count) / 2
    fast = steady[max(0, math.floor(count / 2 - reach))]
    slow = steady[min(count - 1, math.ceil(count / 2 + reach))]
    middle = statistics.median(steady)
    return Throughput(step_tokens / middle, step_tokens / slow, step_tokens / fast, count, warmup)


FLOPS_FORMULA = "6 x matmul parameters + 12 x layers x context x width, per token (arXiv 2204.02311, appendix B)"


def flops_per_token(model: ModelConfig) -> float:
    """Model FLOPs to train on one token, by PaLM's formula, which counts attention as if it were not causal.

    Matmul parameters are the blocks' matrices and the head; embeddings are looked up, not multiplied.
    """
    matmul = model.layers * 12 * model.width**2 + model.padded_vocabulary * model.width
    return 6 * matmul + 12 * model.layers * model.context_length * model.width
