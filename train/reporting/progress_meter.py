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
from train.loop.pace import LONG_STEP_SECONDS
from train.result import TRAINING

SPEED_WINDOW_SECONDS = 15.0
"""Time over which the speed is averaged; the time of three steps or micro-batches if they take longer."""


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
        self._activity = ""
        self._positions: deque[tuple[float, float]] = deque()
        """(time of the clock, number of steps launched by then, with the launched fraction of the current one)."""
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

    def describe(self, activity: str, step: int, micro_batch: int = 0, micro_batches: int = 1) -> tuple[str, str]:
        """Format the progress of a worker that has launched ``step`` steps, and then ``micro_batch`` of the next
        step's ``micro_batches``.

        Returns: (activity, its progress; empty unless the worker is training).
        """
        if activity != self._activity:
            self._activity = activity
            self._positions.clear()
        if activity != TRAINING and not micro_batch:
            return activity, ""
        time_now = self._clock()
        position = step + micro_batch / micro_batches
        if not self._positions or position > self._positions[-1][1]:
            self._positions.append((time_now, position))
        while len(self._positions) > 3 and time_now - self._positions[0][0] > SPEED_WINDOW_SECONDS:
            self._positions.popleft()
        step_seconds = self._step_seconds()
        if activity != TRAINING:
            return activity, self._micro_batch_text(micro_batch, micro_batches, step_seconds)
        self._elapsed = self._elapsed or (time_now, self._trained_seconds)
        texts = [f"step {step:,}" + (f" of {self.total:,}" if self.total else "")]
        if micro_batches > 1 and step_seconds and step_seconds >= LONG_STEP_SECONDS:
            texts.append(self._micro_batch_text(micro_batch, micro_batches, step_seconds))
        if step_seconds:
            texts.append(f"{self._step_tokens / step_seconds:,.0f} tokens/s")
        if self._loss is not None:
            texts.append(f"loss {self._loss:.3f}")
        seconds_left = self._seconds_left(position, step_seconds, time_now)
        if seconds_left is not None:
            texts.append(f"{format_duration(round(seconds_left))} left")
        return activity, " | ".join(texts)

    def _micro_batch_text(self, micro_batch: int, micro_batches: int, step_seconds: float | None) -> str:
        """Format the micro-batch that runs, and the time until its step ends, if that is known."""
        text = f"micro-batch {micro_batch + 1:,} of {micro_batches:,}"
        if step_seconds is None:
            return text
        return f"{text}, {format_duration(round((1 - micro_batch / micro_batches) * step_seconds))} left in the step"

    def _step_seconds(self) -> float | None:
        """Return the seconds per recent step; None until two steps or micro-batches were launched."""
        if len(self._positions) < 2:
            return None
        (start_time, start), (end_time, end) = self._positions[0], self._positions[-1]
        return (end_time - start_time) / (end - start)

    def _seconds_left(self, position: float, step_seconds: float | None, time_now: float) -> float | None:
        if self._time_budget is not None and self._elapsed:
            cycle_time, trained_seconds = self._elapsed
            return max(0.0, self._time_budget - trained_seconds - (time_now - cycle_time))
        return step_seconds and self.total and max(0.0, self.total - position) * step_seconds
