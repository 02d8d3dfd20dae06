"""One trial, in a process of its own: the bare training loop under a memory limit, and a row.

In: a request. Out: a row, returned to the driver, which keeps it: the trial may run on a machine that shares no disk
with the driver. A fresh process, because memory that one configuration leaves behind (segments, graphs, library
workspaces) would count against the next. No MLflow here: the driver creates and closes the runs, since a process that
may die at any moment leaves them open.
"""

import time
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from infra.errors import first_line
from infra.hardware import peak_flops
from infra.place import Place
from infra.telemetry import Telemetry
from pipeline.cache import on_this_machine
from train.config import Cycle, TrainConfig, config_from_json
from train.confirmed import FIRST_STEPS
from train.estimate.flops import palm, utilisation
from train.loop.memory import is_exhausted
from train.loop.memory_limit import Limit
from train.loop.throughput import steady_state
from train.loop.trainer import Trainer
from train.result import CycleReport, RunResult
from tune.trial import early_stop
from tune.trial.row import Proposal, TrialOutcome, TrialRow

THRASHING_STEPS = 2
"""Counted steps with allocator retries that make the outcome ``thrash``: the allocator keeps freeing its cache."""


@dataclass(frozen=True)
class Request:
    """All that a trial's process is told. Sizes in bytes, times in seconds."""

    key: str
    number: int
    proposal: Proposal
    config: dict[str, Any]
    memory_limit: int
    most_steps: int
    most_seconds: float
    precision: float
    """Half-width of the speed's interval, as a fraction, that ends the trial."""
    node: str
    """Name of the machine that runs it, for its row."""


@dataclass
class Watch:
    """Follows a running trial step by step and decides when it ends."""

    request: Request
    step_tokens: int
    limit: Limit
    seconds: list[float] = field(default_factory=list)
    retries: list[int] = field(default_factory=list)
    """The allocator's retries after each step's launch; a change rejects the step.

    A step that compiles again, which a trial's equal batches seldom make one do, needs no such count: the speed is
    that of the median, and a single slow step only makes the interval wider.
    """
    began: float = 0.0
    verdict: str = ""

    def on_cycle(self, report: CycleReport) -> None:
        """Take a step's time; a cycle is one step here."""
        self.began = self.began or time.monotonic()
        self.seconds.append(report.train_seconds)

    def should_stop(self) -> bool:
        """Whether the step just launched is the last."""
        self.retries.append(_retries(self.limit.device))
        if self.limit.device.type == "cpu" and self.limit.used()[0] > self.limit.size:
            self.verdict = "over the limit"
        elif self.began and time.monotonic() - self.began > self.request.most_seconds:
            self.verdict = "time"
        else:
            bar = self.request.proposal.bar
            self.verdict = (
                early_stop.verdict(
                    self.counted(),
                    bar_seconds=self.step_tokens / bar if bar else None,
                    precision=self.request.precision,
                )
                or ""
            )
        return bool(self.verdict)

    def counted(self) -> list[float]:
        """Seconds of the steps without the rejected ones."""
        rejected = self.rejected()
        return [seconds for step, seconds in enumerate(self.seconds) if step not in rejected]

    def rejected(self) -> set[int]:
        """Steps from the third on during which the allocator had to free its cache."""
        return {i for i in range(FIRST_STEPS, len(self.retries)) if self.retries[i] != self.retries[i - 1]}


def fetch_data(request: Request) -> None:
    """Have the trial's data on this machine. Raises ``UserError`` when its storage fails: not an outcome."""
    on_this_machine(Place.of(trial_config(request).data))


def run(request: Request) -> tuple[TrialRow, str | None]:
    """Run the trial: its row, and the traceback of one that failed; never raises for what the configuration does."""
    began = time.monotonic()
    config = trial_config(request)
    trace: str | None = None
    watch: Watch | None = None
    result: RunResult | None = None
    try:
        watch = Watch(request, config.step_tokens, Limit.impose(request.memory_limit, config.device))
        trainer = Trainer(config, on_cycle=watch.on_cycle, should_stop=watch.should_stop)
        with Telemetry(lambda second, metrics: None) as telemetry:
            result = trainer.run()
        result = replace(result, telemetry=trainer.while_training(telemetry))
        watch.retries.append(_retries(watch.limit.device))
        outcome, reason = judge(watch, result)
    except Exception as failure:  # noqa: BLE001 a trial that fails is a row like any other
        if isinstance(failure, RuntimeError) and is_exhausted(failure):
            outcome, reason = "oom", first_line(failure)
        else:
            outcome, reason = "failed", f"{type(failure).__name__}: {first_line(failure)}"
            trace = traceback.format_exc()
    row = make_row(request, config, watch, result, outcome, reason)
    return replace(row, seconds=time.monotonic() - began), trace


def trial_config(request: Request) -> TrainConfig:
    """The run of one trial: the candidate's, with cycles of one step, without validation."""
    config = config_from_json(request.config, "the trial's config")
    return replace(config, steps=request.most_steps, tokens=None, time_budget=None, cycle=Cycle(1, 0))


def judge(watch: Watch, result: RunResult) -> tuple[TrialOutcome, str]:
    """The outcome of a run that returned, and its reason in words."""
    if result.outcome == "oom":
        return "oom", result.reason
    if excess := watch.limit.excess():
        return "over_limit", excess
    if result.outcome == "diverged":
        return "failed", result.reason
    rejected = len(watch.rejected())
    if rejected >= THRASHING_STEPS:
        return "thrash", f"the allocator had to free its cache in {rejected} steps"
    measured = steady_state(watch.counted(), watch.step_tokens)
    if measured is None:
        counted = f"only {len(watch.counted())} steps could be counted"
        if watch.verdict == "time":
            return "failed", f"{counted} in the trial's time, too few for a speed: raise --trial-time"
        return "failed", f"{counted}, too few for a speed"
    if watch.verdict == "cannot win":
        return "stopped", f"cannot reach {watch.request.proposal.bar:,.0f} tokens/s after {measured.steps} steps"
    ended = {"precise": "the interval is narrow enough", "time": "the trial's time is used up"}
    note = f"; {rejected} step rejected" if rejected else ""  # two are thrashing
    return "ok", ended.get(watch.verdict, f"ran its {result.steps} steps") + note


def make_row(
    request: Request,
    config: TrainConfig,
    watch: Watch | None,
    result: RunResult | None,
    outcome: TrialOutcome,
    reason: str,
) -> TrialRow:
    """The trial's row from whatever was measured before it ended."""
    measured = steady_state(watch.counted(), config.step_tokens) if watch else None
    used, source = watch.limit.used() if watch else (None, None)
    peak = peak_flops(result.device, config.precision) if result else None
    steady = config.step_tokens / measured.tokens_per_second if measured else None
    return TrialRow(
        key=request.key,
        number=request.number,
        stage=request.proposal.stage,
        round=request.proposal.round,
        candidate=request.proposal.candidate,
        accumulation=config.accumulation,
        outcome=outcome,
        reason=reason,
        seconds=0.0,
        predicted_memory=request.proposal.predicted_memory,
        predicted_speed=request.proposal.predicted_speed,
        tokens_per_second=measured.tokens_per_second if measured else None,
        low=measured.low if measured else None,
        high=measured.high if measured else None,
        memory=used,
        memory_source=source,
        allocated=result.memory.allocated if result else None,
        reserved=result.memory.reserved if result else None,
        allocator_retries=result.memory.allocator_retries if result else 0,
        rejected_steps=len(watch.rejected()) if watch else 0,
        mfu=utilisation(measured.tokens_per_second, palm(config.model), peak, 1) if measured else None,
        compile_seconds=max(0.0, watch.seconds[0] - steady) if watch and steady else None,
        data_wait_fraction=result.data_wait_fraction if result else None,
        train_loss=result.train_loss if result else None,
        device=result.device if result else None,
        node=request.node,
        telemetry=result.telemetry if result else {},
        too_short=outcome == "failed" and measured is None and watch is not None and watch.verdict == "time",
        step_seconds=watch.seconds if watch else [],
    )


def _retries(device: torch.device) -> int:
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else 0
