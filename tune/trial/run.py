"""Run a trial: the training loop in this process, under a memory limit if there is one, and its row.

Each trial has a fresh process, because memory that a configuration leaves behind (segments, graphs, library workspaces)
would count for the next configuration. A trial does not use MLflow. The driver opens and closes its run, because a
process that is killed would leave the run open.
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from infra.errors import UserError, first_line
from train.config import Execution, ResolvedConfig
from train.data.sources import source_of
from train.launch.job import WorkerJob
from train.launch.link import CycleDone, Message
from train.launch.session import Driver, WorkerSession
from train.loop.memory import is_oom_error
from train.loop.memory_limit import MemoryLimit
from train.loop.result_builder import StepTimes, with_throughput
from train.loop.throughput import steady_state
from train.model_config import ModelSpec
from train.result import RunResult
from train.search_reference import FIRST_STEPS
from tune.trial import early_stop
from tune.trial.row import Proposal, TrialOutcome, TrialRow

THRASHING_STEPS = 2
"""Minimum number of steps in which the allocator freed its cache for the outcome ``thrash``."""


@dataclass(frozen=True)
class StopRule:
    """The rule that ends a trial that only measures speed: a time limit, or a sufficient precision of the speed."""

    seconds: float
    """Maximum time of the trial's steps after the first one, in seconds."""
    precision: float
    """Relative half-width of the speed's confidence interval at which the trial ends."""


@dataclass(frozen=True)
class TrialRequest:
    """The input of a trial's process. Sizes in bytes, times in seconds."""

    key: str
    number: int
    name: str
    proposal: Proposal
    config: ResolvedConfig
    node: str
    """Name of the machine that runs the trial, for its row."""
    memory_limit: int | None = None
    stop_rule: StopRule | None = None
    """None for a rung: the config alone sets its length, because its losses are compared, too."""
    timeout: float | None = None
    """Time after its start at which the trial's process is killed."""
    labels: dict[str, str] = field(default_factory=dict)
    """Additional columns of the trial in MLflow's list of runs."""

    def rows(self) -> Iterator[tuple[TrialRow, str | None]]:
        """Run the trial in this process, and yield its row, and the row so far before that, if it has parts.

        Yields: (the trial's row, the traceback if it failed unexpectedly).
        """
        yield run(self)


def pending_row(request: TrialRequest) -> TrialRow:
    """Create a row without speed and memory for a running trial, so that strategies do not propose it again."""
    return unmeasured_row(request, "ok", "running", 0.0)


def unmeasured_row(request: TrialRequest, outcome: TrialOutcome, reason: str, seconds: float) -> TrialRow:
    """Create the row of a trial without measurements."""
    proposal = request.proposal
    return TrialRow(
        request.key, request.number, proposal.stage, proposal.round, proposal.candidate,
        request.config.batch.accumulation, outcome, reason, seconds, proposal.predicted_memory,
        proposal.predicted_speed, node=request.node, name=request.name, labels=request.labels,
    )  # fmt: skip


@dataclass
class TrialMonitor(Driver):
    """Monitors a running trial after each step, which is a cycle, and decides when it ends."""

    stop_rule: StopRule
    speed_threshold: float | None
    """Speed in tokens/s that the trial must reach to win; None if it is never pruned."""
    step_tokens: int
    limit: MemoryLimit | None = None
    """Memory limit of the session; None until the session connects."""
    seconds: list[float] = field(default_factory=list)
    """Duration of each step in seconds."""
    retries: list[int] = field(default_factory=list)
    """Total number of allocator retries after the launch of each step, and at the end.

    A step in which the number increases is excluded from the speed. Recompilations are not detected, because the equal
    batches of a trial rarely cause one, and a single slow step only widens the interval of a median.
    """
    started_at: float = 0.0
    """Time of the clock at the end of the first step; 0 before."""
    verdict: str = ""
    """Reason to end the trial: time, over the limit, cannot win or precise; empty until then."""

    checks_memory = True  # The loop would query NVML after each step, which takes milliseconds.

    @contextmanager
    def connect(self, session: WorkerSession) -> Iterator[None]:
        self.limit = session.limit
        yield
        self.retries.append(self._allocator_retries())

    def post(self, message: Message) -> None:
        if isinstance(message, CycleDone):
            self.started_at = self.started_at or time.monotonic()
            self.seconds.append(message.cycle["train_seconds"])

    def should_stop(self) -> bool:
        """Return whether the step that was just launched is the last step of the trial."""
        self.retries.append(self._allocator_retries())
        if self.limit and self.limit.device.type == "cpu" and self.limit.excess_message():
            self.verdict = "over the limit"
        elif self.started_at and time.monotonic() - self.started_at > self.stop_rule.seconds:
            self.verdict = "time"
        else:
            threshold_seconds = self.step_tokens / self.speed_threshold if self.speed_threshold else None
            precision = self.stop_rule.precision
            self.verdict = (
                early_stop.verdict(self.valid_seconds(), threshold_seconds=threshold_seconds, precision=precision) or ""
            )
        return bool(self.verdict)

    def _allocator_retries(self) -> int:
        if self.limit is None or self.limit.device.type != "cuda":
            return 0
        return torch.cuda.memory_stats(self.limit.device).get("num_alloc_retries", 0)

    def valid_seconds(self) -> list[float]:
        """Return the durations of the steps that count for the speed, in seconds."""
        rejected_steps = self.rejected_steps()
        return [seconds for step, seconds in enumerate(self.seconds) if step not in rejected_steps]

    def rejected_steps(self) -> set[int]:
        """Return the indices of the steps, from the third step on, in which the allocator freed its cache."""
        return {i for i in range(FIRST_STEPS, len(self.retries)) if self.retries[i] != self.retries[i - 1]}


def fetch_data(request: TrialRequest) -> None:
    """Download the trial's data to this machine. Raises ``UserError`` if storage fails."""
    source_of(request.config.dataset).download()


def run(request: TrialRequest) -> tuple[TrialRow, str | None]:
    """Run the trial. An error of its configuration is not raised, but is the outcome of the trial.

    Returns: (the trial's row, the traceback if it failed unexpectedly).
    """
    started_at = time.monotonic()
    config, monitor = request.config, None
    if request.stop_rule and request.memory_limit:
        monitor = TrialMonitor(request.stop_rule, request.proposal.speed_threshold, config.step_tokens)
    session = WorkerSession(WorkerJob(config, request.memory_limit), folder=None, driver=monitor or Driver())
    result = trace = None
    try:
        result = session.run().result
        assert result is not None, "a session without an exception has a result"
        result = as_trial_result(result, config.model, config.execution, monitor, session.limit)
        outcome, reason = classify_outcome(result, monitor)
    except UserError as mistake:
        outcome, reason = "failed", str(mistake).rstrip(".")
    except Exception as failure:  # noqa: BLE001 the error becomes the outcome of the trial
        outcome, reason, trace = classify_failure(failure)
    row = make_row(unmeasured_row(request, outcome, reason, 0.0), config.step_tokens, result, monitor, session.times)
    return replace(row, seconds=time.monotonic() - started_at), trace


def classify_failure(failure: Exception) -> tuple[TrialOutcome, str, str | None]:
    """Classify the exception, which is being handled, that ended a trial.

    Returns: (outcome, reason, traceback of an unexpected exception).
    """
    if isinstance(failure, RuntimeError) and is_oom_error(failure):
        return "oom", first_line(failure), None
    return "failed", f"{type(failure).__name__}: {first_line(failure)}", traceback.format_exc()


def as_trial_result(
    result: RunResult, model: ModelSpec, execution: Execution, monitor: TrialMonitor | None, limit: MemoryLimit | None
) -> RunResult:
    """Return ``result`` with the speed of the steps that count, and with the memory that is compared with the limit."""
    if monitor:
        throughput = None if result.implausible_reason else steady_state(monitor.valid_seconds(), monitor.step_tokens)
        result = with_throughput(result, throughput, model, execution, workers=1)
    if limit:
        used_bytes, source = limit.used()
        result = replace(result, memory=replace(result.memory, process=used_bytes, process_source=source))
    return result


def classify_outcome(result: RunResult, monitor: TrialMonitor | None = None) -> tuple[TrialOutcome, str]:
    """Classify the outcome of a run that ended without an exception. The trials of a search have a ``monitor``.

    Returns: (outcome, reason).
    """
    if result.outcome in ("oom", "over_limit"):
        return result.outcome, result.reason
    if monitor and monitor.limit and (excess := monitor.limit.excess_message()):
        return "over_limit", excess
    if result.implausible_reason or result.outcome == "diverged":
        return "failed", result.implausible_reason or result.reason
    if monitor is None:
        if result.outcome != "finished":
            return "failed", f"{result.outcome}: {result.reason}"
        if result.throughput is None:
            reason = f"{result.steps} steps are too few, because the run did not get past warm-up"
            return "failed", f"{reason}; increase its time or its number of steps"
        return "ok", result.reason
    rejected = len(monitor.rejected_steps())
    if rejected >= THRASHING_STEPS:
        return "thrash", f"the allocator freed its cache in {rejected} steps"
    if result.throughput is None:
        in_time = " within the trial's time" if monitor.verdict == "time" else ""
        advice = "; increase --trial-time" if in_time else ""
        return "failed", f"only {len(monitor.valid_seconds())} valid steps{in_time}, too few to measure a speed{advice}"
    if monitor.verdict == "cannot win":
        steps = result.throughput.steps
        return "pruned", f"cannot reach {monitor.speed_threshold:,.0f} tokens/s after {steps} steps"
    reasons = {"precise": "speed interval is narrow enough", "time": "trial time reached"}
    note = f"; {rejected} step excluded" if rejected else ""  # From two steps on, the outcome is thrash.
    return "ok", reasons.get(monitor.verdict, f"completed {result.steps} steps") + note


def make_row(
    row: TrialRow, step_tokens: int, result: RunResult | None, monitor: TrialMonitor | None, times: StepTimes
) -> TrialRow:
    """Add the ``result`` of a trial and its steps to ``row``, which has its outcome."""
    row = replace(
        row, result=result, rejected_steps=len(monitor.rejected_steps()) if monitor else 0, step_tokens=step_tokens,
        step_seconds=monitor.seconds if monitor else times.steps,
        losses=[loss for cycle in times.reports for loss in cycle.step_losses],
    )  # fmt: skip
    is_short = monitor.verdict == "time" if monitor else bool(result and result.outcome == "finished")
    is_implausible = bool(result and result.implausible_reason)
    return replace(
        row, ended_too_early=row.outcome == "failed" and row.speed is None and is_short and not is_implausible
    )
