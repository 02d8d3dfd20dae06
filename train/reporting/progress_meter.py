"""The progress of a run between two cycles: its step, speed and time left, from updates that a worker sends regularly.

The loop only counts steps, so that the progress costs it no time. On a GPU, launched steps are counted, a few of which
have not been computed yet.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from infra.cli.units import format_duration
from pipeline.shards import Manifest
from train.result import TRAINING

SPEED_WINDOW_SECONDS = 15.0
"""Time over which the speed is averaged; the time of three steps if they take longer."""


class ProgressMeter:
    """The step, speed, loss and time left of a run, for its progress line."""

    def __init__(
        self,
        step_tokens: int,
        total_steps: int | None,
        time_budget: float | None,
        manifest: Manifest,
        clock: Callable[[], float] = time.monotonic,
        trained_seconds: float = 0.0,
    ) -> None:
        """Start with ``trained_seconds`` of training, which a resumed run has from its checkpoint."""
        self._step_tokens, self._time_budget = step_tokens, time_budget
        self._clock = clock
        self._trained_seconds = trained_seconds
        self._steps: deque[tuple[float, int]] = deque()
        self._loss: float | None = None
        self._elapsed: tuple[float, float] | None = None
        """(time of the clock, seconds of training by then)."""
        self.total = total_steps
        """Number of steps of the run, or of an epoch by its tokens; None if a time budget ends the run."""
        if self.total is None and time_budget is None:
            self.total = max(1, manifest.splits["train"]["tokens"] // step_tokens)

    def cycle(self, cycle: Mapping[str, Any]) -> None:
        """Take the loss and the training time of a reported ``cycle``."""
        self._loss = cycle["train_loss"]
        self._elapsed = self._clock(), cycle["elapsed"]

    def describe(self, activity: str, step: int) -> tuple[str, str]:
        """Format the progress of a worker that has launched ``step`` steps.

        Returns: (activity, its progress; empty unless the worker is training).
        """
        if activity != TRAINING:
            self._steps.clear()
            return activity, ""
        time_now = self._clock()
        self._elapsed = self._elapsed or (time_now, self._trained_seconds)
        if not self._steps or step > self._steps[-1][1]:
            self._steps.append((time_now, step))
        while len(self._steps) > 3 and time_now - self._steps[0][0] > SPEED_WINDOW_SECONDS:
            self._steps.popleft()
        texts = [f"step {step:,}" + (f" of {self.total:,}" if self.total else "")]
        if step_seconds := self._step_seconds():
            texts.append(f"{self._step_tokens / step_seconds:,.0f} tokens/s")
        if self._loss is not None:
            texts.append(f"loss {self._loss:.3f}")
        seconds_left = self._seconds_left(step, step_seconds, time_now)
        if seconds_left is not None:
            texts.append(f"{format_duration(round(seconds_left))} left")
        return activity, " | ".join(texts)

    def _step_seconds(self) -> float | None:
        """Return the seconds per recent step; None until two steps were launched."""
        if len(self._steps) < 2:
            return None
        (start_time, start_step), (end_time, end_step) = self._steps[0], self._steps[-1]
        return (end_time - start_time) / (end_step - start_step)

    def _seconds_left(self, step: int, step_seconds: float | None, time_now: float) -> float | None:
        if self._time_budget is not None and self._elapsed:
            cycle_time, trained_seconds = self._elapsed
            return max(0.0, self._time_budget - trained_seconds - (time_now - cycle_time))
        return step_seconds and self.total and max(0, self.total - step) * step_seconds
