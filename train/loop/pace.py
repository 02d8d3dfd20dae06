"""The pace of a run by the clock: when a cycle ends, how long a validation may take, and when a time budget is used up.

The first worker's clock decides. The clock is the host's, because nothing may wait for the device inside a cycle; in
steps that are long enough to matter, the host is at most a few kernels ahead.
"""

import math
from collections import deque
from collections.abc import Callable

from train.config import DurationConfig

LONG_STEP_SECONDS = 2.0
"""Length of a step from which its micro-batches are shown, timed and interruptible."""

VAL_SHARE, MAX_VAL_SHARE = 0.05, 0.1
"""Share of the training time for which a validation is sized, and the share that all validations together may take.

The share for sizing is smaller, so that the same number of windows also fits later cycles, which may be faster.
"""

MIN_TRAIN_SHARE = 0.5
"""Minimum share of a time budget that is used for training, if the end of the run would need more than the rest."""

TRAINING_PER_FORWARD = 3.0
"""Time of a forward and a backward pass, in forward passes: a backward pass has twice the FLOPs of a forward pass."""

RECENT_STEPS = 10
"""Number of steps whose mean time predicts the next one's."""


class Pace:
    """The times of a run's steps and validations, and the decisions that follow from them.

    Args:
        duration: the length of the run and of its cycles.
        accumulation: micro-batches per step.
        compiles: whether the first step compiles the model.
        clock: returns the time in seconds.
        elapsed: seconds of training before this process.
    """

    def __init__(
        self,
        duration: DurationConfig,
        accumulation: int,
        clock: Callable[[], float],
        *,
        compiles: bool = False,
        elapsed: float = 0.0,
    ) -> None:
        self.duration = duration
        self.pass_seconds: float | None = None
        """Seconds of a forward pass of the validation on all workers; None if it was not timed."""
        self._accumulation, self._compiles = accumulation, compiles
        self._clock, self._elapsed_before = clock, elapsed
        self._started: float | None = None
        """Time of the end of this process's first step; None before."""
        self._cycle_start = self._step_start = clock()
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._first_step = math.inf
        """Seconds of the first step; infinite before its end, or if it compiled."""
        self._reserve = 0.0
        """Seconds that are reserved for the end of the run."""
        self._trained = self._validated = 0.0
        """Seconds of training and of validation in the cycles of this process that have ended."""

    @property
    def elapsed(self) -> float:
        """Seconds since the end of the first step, including those of earlier processes."""
        return self._elapsed_before + (0.0 if self._started is None else self._clock() - self._started)

    @property
    def cycle_seconds(self) -> float:
        """Seconds of training in the current cycle, without the first step of the process."""
        return 0.0 if self._started is None else self._clock() - self._cycle_start

    @property
    def step_seconds(self) -> float:
        """Estimated seconds of the next step; 0 if nothing is known."""
        if self._recent:
            return sum(self._recent) / len(self._recent)
        if self.pass_seconds is None:  # The first step alone may have filled caches for most of its time.
            return 0.0
        return min(self._first_step, self._accumulation * TRAINING_PER_FORWARD * self.pass_seconds)

    @property
    def has_long_steps(self) -> bool:
        """Whether steps take so long that their micro-batches are shown and interruptible."""
        return self.step_seconds >= LONG_STEP_SECONDS

    @property
    def train_budget(self) -> float | None:
        """The time budget without the share for the end of the run, for which :meth:`reserve` was called last."""
        budget = self.duration.time_budget
        return None if budget is None else max(budget - self._reserve, MIN_TRAIN_SHARE * budget)

    def begin_step(self) -> None:
        """Note that a step begins."""
        self._step_start = self._clock()

    def end_step(self) -> None:
        """Note that a step has ended. The run's time begins with the end of the first one."""
        seconds = self._clock() - self._step_start
        if self._started is not None:
            self._recent.append(seconds)
            return
        self._started = self._cycle_start = self._clock()
        self._first_step = math.inf if self._compiles else seconds

    def next_step_ends_cycle(self, *, is_new: bool) -> bool:
        """Return whether a cycle whose length is a time ends with the next step, whose end is nearest to that time.

        If it ``is_new``, the current cycle has ended, and the next step is the first of another one.
        """
        trained = 0.0 if is_new else self.cycle_seconds
        return trained + 1.5 * self.step_seconds >= self.duration.cycle.seconds

    def val_passes(self) -> int:
        """Return the number of forward passes of a validation that take a small share of the current cycle's
        training; at least one."""
        seconds = self.pass_seconds
        return max(1, int(VAL_SHARE * self.cycle_seconds / seconds)) if seconds else 1

    def may_validate(self, passes: int) -> bool:
        """Return whether validations take at most a tenth of the training time, including one of ``passes``."""
        trained = self._trained + self.cycle_seconds
        return self._validated + passes * (self.pass_seconds or 0.0) <= MAX_VAL_SHARE * trained

    def end_training(self) -> None:
        """Note that the training of a cycle has ended."""
        self._trained += self.cycle_seconds

    def end_validation(self, passes: int, seconds: float | None) -> None:
        """Note that ``passes`` forward passes of a validation took ``seconds``; None if they have not been computed
        yet."""
        if seconds is None:
            seconds = passes * (self.pass_seconds or 0.0)
        elif self.pass_seconds is not None:
            self.pass_seconds = seconds / passes
        self._validated += seconds

    def begin_cycle(self) -> None:
        """Note that the training of a cycle begins."""
        self._cycle_start = self._clock()

    def reserve(self, passes: int | None, seconds: float) -> None:
        """Reserve time of the budget for a last validation and for ``seconds`` of other work at the end of the run.

        The validation has ``passes`` forward passes; None if their number will be chosen.
        """
        forward = self.pass_seconds or 0.0
        validation = max(forward, VAL_SHARE * self.cycle_seconds) if passes is None else passes * forward
        self._reserve = validation + seconds

    def is_budget_used(self) -> bool:
        """Return whether another step would exceed the time budget."""
        budget = self.train_budget
        return budget is not None and self.elapsed + self.step_seconds > budget
