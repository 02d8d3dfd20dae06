"""Losses, differences of losses and times of a search for the lowest loss as texts."""

import math

from infra.cli.units import format_duration
from train.intervals import Estimate


def format_time(seconds: float) -> str:
    """Format a time with about three significant digits, such as ``7.5s``, ``12m30s`` or ``2h12m``."""
    if not math.isfinite(seconds) or seconds <= 0:
        return format_duration(seconds)
    if seconds >= 3600:
        return format_duration(60 * round(seconds / 60))
    return format_duration(round(seconds, min(1, 2 - math.floor(math.log10(seconds)))))


def loss_text(loss: Estimate, *, short: bool = False) -> str:
    """Format a loss and its interval, such as ``3.520 (95% CI 3.490 to 3.550)``, or without ``95% CI`` if ``short``."""
    return f"{loss.middle:.3f} ({'' if short else '95% CI '}{loss.low:.3f} to {loss.high:.3f})"


def time_text(time: Estimate, *, short: bool = False) -> str:
    """Format a time and its interval, such as ``24m (95% CI 20m to 31m)``, or without ``95% CI`` if ``short``."""
    if math.isinf(time.middle):
        return f"more than {format_time(time.low)}"
    interval = f"{format_time(time.low)} to {format_time(time.high)}"
    if math.isinf(time.high):
        interval = f"at least {format_time(time.low)}"
    return f"{format_time(time.middle)} ({'' if short else '95% CI '}{interval})"


def difference_text(difference: Estimate | None) -> str:
    """Format a difference of losses such as ``-0.118``, in brackets if it is not significant, or ``-`` for None."""
    if difference is None:
        return "-"
    text = f"{difference.middle:+.3f}"
    return f"({text})" if difference.low <= 0 <= difference.high else text
