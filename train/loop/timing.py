"""Marks on the device's own timeline, made without waiting for it."""

import time
from typing import Any

import torch

Mark = Any
"""A moment on the device's timeline: a CUDA event, or seconds of the host's clock on the CPU."""


def mark(device: torch.device) -> Mark:
    """Mark this point in the device's work, without waiting for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def is_immediate(device: torch.device) -> bool:
    """Return whether work on ``device`` has ended when the call that starts it returns."""
    return device.type != "cuda"


def wait_for(mark: Mark) -> None:
    """Wait until the device has reached ``mark``."""
    if isinstance(mark, torch.cuda.Event):
        mark.synchronize()


def seconds_between(first: Mark, last: Mark) -> float:
    """Return the seconds from ``first`` to ``last``; both must have been reached."""
    return first.elapsed_time(last) / 1000 if isinstance(first, torch.cuda.Event) else last - first
