"""How a run is getting on between two cycles: its step, speed and time left, from what its worker says twice a second.

The loop only counts steps, so that showing them costs it nothing. On a GPU these are the steps that were launched, a
few more than have been computed.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from infra.cli.units import format_duration
from pipeline.shards import Manifest
from train.result import TRAINING

WINDOW = 15.0
"""Seconds over which the speed is taken, or as long as three steps take."""


class ProgressMeter:
    def __init__(
        self,
        step_tokens: int,
        total_steps: int | None,
        time_budget: float | None,
        manifest: Manifest,
        clock: Callable[[], float] = time.monotonic,
        trained_seconds: float = 0.0,
    ) -> None:
        """``trained_seconds`` are the seconds that a run which is continued has trained already."""
        self._step_tokens, self._time_budget = step_tokens, time_budget
        self._clock = clock
        self._spent = trained_seconds
        self._steps: deque[tuple[float, int]] = deque()
        self._loss: float | None = None
        self._elapsed: tuple[float, float] | None = None
        """When it was known, and how long the run had trained then."""
        self.total = total_steps
        """Steps of the run, of an epoch by the number of its tokens; None when only time ends it."""
        if self.total is None and time_budget is None:
            self.total = max(1, manifest.splits["train"]["tokens"] // step_tokens)

    def cycle(self, cycle: Mapping[str, Any]) -> None:
        self._loss = cycle["train_loss"]
        self._elapsed = self._clock(), cycle["elapsed"]

    def describe(self, what: str, step: int) -> tuple[str, str]:
        """What the worker does and, while it trains, how it is getting on, as text; it has launched ``step`` steps."""
        if what != TRAINING:
            self._steps.clear()
            return what, ""
        now = self._clock()
        self._elapsed = self._elapsed or (now, self._spent)
        if not self._steps or step > self._steps[-1][1]:
            self._steps.append((now, step))
        while len(self._steps) > 3 and now - self._steps[0][0] > WINDOW:
            self._steps.popleft()
        parts = [f"step {step:,}" + (f" of {self.total:,}" if self.total else "")]
        if seconds := self._step_seconds():
            parts.append(f"{self._step_tokens / seconds:,.0f} tokens/s")
        if self._loss is not None:
            parts.append(f"loss {self._loss:.3f}")
        left = self._left(step, seconds, now)
        if left is not None:
            parts.append(f"{format_duration(round(left))} left")
        return what, " | ".join(parts)

    def _step_seconds(self) -> float | None:
        """Seconds per step lately; None until two steps have been seen."""
        if len(self._steps) < 2:
            return None
        (first, begin), (last, end) = self._steps[0], self._steps[-1]
        return (last - first) / (end - begin)

    def _left(self, step: int, seconds: float | None, now: float) -> float | None:
        if self._time_budget is not None and self._elapsed:
            known, elapsed = self._elapsed
            return max(0.0, self._time_budget - elapsed - (now - known))
        return seconds and self.total and max(0, self.total - step) * seconds
