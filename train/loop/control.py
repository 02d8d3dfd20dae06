"""What follows each step of a run: its end, the end of a cycle, a validation. The first worker decides for all."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infra.cli.units import format_count
from train.callbacks import Callback
from train.config import ResolvedConfig
from train.loop.pace import Pace
from train.loop.throughput import is_precise
from train.loop.validator import Validator
from train.models.parallel import Workers
from train.result import CycleReport, Outcome
from train.run_files.progress import RunState

OUTCOMES: tuple[Outcome | None, ...] = (None, "finished", "interrupted", "over_limit")
"""Outcomes of a decision, whose indices the workers exchange; the largest one counts."""


@dataclass(frozen=True)
class Callbacks:
    """Functions that the loop calls on the first worker."""

    on_cycle: Callable[[CycleReport], object] = lambda report: None
    """Called with each cycle's report."""
    should_stop: Callable[[], bool] = lambda: False
    """Called after each step; returns whether the run must stop after it, as interrupted."""
    user_callbacks: Sequence[Callback] = ()
    """Callbacks of a Python program; the run is finished after the step in which one of them stops it."""
    should_discard: Callable[[], bool] = lambda: False
    """Called between the micro-batches of a long step; returns whether the run must stop now, without this step."""
    on_line: Callable[[str], object] = lambda text: None
    """Called with a line for the user."""
    clock: Callable[[], float] = time.perf_counter
    """Called for the time in seconds, by which cycles and the time budget end."""


@dataclass(frozen=True)
class Decision:
    """What the workers do after a step."""

    outcome: Outcome | None
    """The outcome, if the run ends after this step."""
    reason: str
    """The reason why the run ends."""
    closes: bool
    """Whether the cycle ends after this step."""
    validates: bool
    """Whether a validation follows."""
    next_closes: bool
    """Whether the next step is the last one of its cycle by the time."""


class Control:
    """Decides after each step what all workers do next. Any worker can report that it exceeds its memory limit.

    Args:
        config: the run.
        workers: the workers of the run.
        callbacks: called on the first worker.
        validator: runs the validations; None without validation.
        total: number of steps of the run; None if a time budget ends it.
        elapsed: seconds of training before this process.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        workers: Workers,
        callbacks: Callbacks,
        validator: Validator | None,
        total: int | None,
        elapsed: float,
    ) -> None:
        self._duration, self._workers, self._callbacks = config.duration, workers, callbacks
        self._validator, self._total = validator, total
        self.pace = Pace(
            config.duration, config.batch.accumulation, callbacks.clock,
            compiles=config.execution.compile != "off", elapsed=elapsed,
        )  # fmt: skip
        self.elapsed = elapsed
        """Seconds of training until the last decision."""
        self.is_interruptible = True
        """Whether the current step may be discarded between its micro-batches: the first one, and all if they are
        long."""
        budget = config.duration.time_budget
        self._budget_used = elapsed / budget if budget else 0.0

    def progress(self, step: int) -> float:
        """Return the fraction of the run that has passed after ``step``, by steps or by the time budget."""
        return min(1.0, self._budget_used) if self._total is None else step / self._total

    def first_step_closes(self) -> bool:
        """Return whether the first step is expected to take as long as a cycle whose length is a time."""
        by_time = self._duration.cycle.train_steps is None
        closes = by_time and self._workers.is_first and self.pace.next_step_ends_cycle(is_new=True)
        return bool(self._workers.all_max(closes)[0])

    def must_discard(self) -> bool:
        """Return whether the workers stop before the next micro-batch or pass."""
        return bool(self._workers.all_max(self._workers.is_first and self._callbacks.should_discard())[0])

    def decide(
        self,
        state: RunState,
        *,
        whole: bool,
        excess: str,
        step_seconds: Sequence[float],
        closing_seconds: float,
        stopped_by: Callback | None,
    ) -> Decision:
        """Return what follows after the last step of ``state``.

        Args:
            state: the run's counters.
            whole: whether the cycle has all its steps.
            excess: a message if this process exceeds its memory limit, else empty.
            step_seconds: the seconds of the steps of the reported cycles.
            closing_seconds: time from the last step to the end of the run, without the validation.
            stopped_by: the callback of a Python program that stops the run.
        """
        outcome: Outcome | None = None
        reason = ""
        if self._workers.is_first:
            self.pace.reserve(self._passes(state), closing_seconds)
            outcome, reason = self._outcome(state, step_seconds, stopped_by)
        if excess:
            outcome, reason = "over_limit", excess
        closes = whole or outcome == "finished"
        validates = closes and self._may_validate(state, outcome)
        next_closes = self._duration.cycle.train_steps is None and self.pace.next_step_ends_cycle(is_new=closes)
        elapsed, budget = self.pace.elapsed, self.pace.train_budget
        budget_used, long = elapsed / budget if budget else 0.0, self.pace.has_long_steps
        values = [elapsed, budget_used, long, closes, validates, next_closes]
        code, self.elapsed, self._budget_used, long, closes, validates, next_closes = self._workers.all_max(
            OUTCOMES.index(outcome), *(values if self._workers.is_first else [0.0] * len(values))
        )
        self.is_interruptible = bool(long)
        reason = reason or "ended by another worker"
        return Decision(OUTCOMES[int(code)], reason, bool(closes), bool(validates), bool(next_closes))

    def _outcome(
        self, state: RunState, step_seconds: Sequence[float], stopped_by: Callback | None
    ) -> tuple[Outcome | None, str]:
        """Return whether and why the run ends, for the first worker."""
        tolerance = self._duration.speed_tolerance
        if self._total is not None and state.step >= self._total:
            return "finished", f"reached {format_count(state.step, 'step')}"
        if self.pace.is_budget_used():
            return "finished", "time budget reached"
        if tolerance and state.step == state.last_reported_step + 1 and is_precise(step_seconds, tolerance):
            return "finished", f"speed measured to within {tolerance:.1%}"
        if stopped_by:
            return "finished", f"stopped by the callback {type(stopped_by).__name__}"
        return ("interrupted", "stop requested") if self._callbacks.should_stop() else (None, "")

    def val_windows(self, state: RunState) -> int:
        """Return the number of windows of a validation, which is chosen before the first one, by all workers."""
        assert self._validator is not None, "a run without validation windows does not validate"
        if state.val_windows:
            return state.val_windows
        (passes,) = self._workers.all_max(self.pace.val_passes() if self._workers.is_first else 0)
        return self._validator.windows_of(int(passes))

    def _passes(self, state: RunState) -> int | None:
        """Return the number of forward passes of a validation; None if it will be chosen."""
        if self._validator is None:
            return 0
        return self._validator.passes(state.val_windows) if state.val_windows else None

    def _may_validate(self, state: RunState, outcome: Outcome | None) -> bool:
        """Return whether a validation may follow; one that the user has sized always may, and so may the last one."""
        if self._validator is None:
            return False
        if outcome == "finished" or self._duration.cycle.val_batches is not None:
            return True
        passes = self._passes(state)
        return self.pace.may_validate(self.pace.val_passes() if passes is None else passes)
