"""One trial, in a process of its own: the bare training loop, under a memory limit if there is one, and a row.

A fresh process, because memory that one configuration leaves behind (segments, graphs, library workspaces) would count
against the next. No MLflow here: the driver creates and closes the runs, since a process that may die at any moment
leaves them open.
"""

import time
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from infra.errors import UserError, first_line
from infra.hardware import peak_flops
from infra.storage_dir import StorageDir
from infra.telemetry import Telemetry
from pipeline.cache import on_this_machine
from train.config import TrainConfig, config_from_json
from train.confirmed import FIRST_STEPS
from train.data.source import stream_of
from train.data.stream import StreamData
from train.estimate.flops import per_token, utilisation
from train.loop.conclusion import Spent
from train.loop.execution import choose_allocator
from train.loop.memory import is_exhausted
from train.loop.memory_limit import Limit
from train.loop.shortage import OutOfMemory
from train.loop.throughput import steady_state
from train.loop.trainer import Trainer
from train.result import CycleReport, RunResult
from tune.trial import early_stop
from tune.trial.row import Proposal, TrialOutcome, TrialRow

THRASHING_STEPS = 2
"""Counted steps with allocator retries that make the outcome ``thrash``: the allocator keeps freeing its cache."""


@dataclass(frozen=True)
class Early:
    """When a trial whose speed alone is wanted ends: by its time, or once its speed is known."""

    seconds: float
    """Most time of its steps, after the first."""
    precision: float
    """Half-width of the speed's interval, as a fraction."""


@dataclass(frozen=True)
class Request:
    """All that a trial's process is told. Sizes in bytes, times in seconds."""

    key: str
    number: int
    name: str
    proposal: Proposal
    config: dict[str, Any]
    """The resolved run."""
    node: str
    """Name of the machine that runs it, for its row."""
    memory_limit: int | None = None
    early: Early | None = None
    """None where the config alone says how long it runs: a rung, whose losses count as well."""
    patience: float | None = None
    """Time after its start at which it is killed."""


def pending(request: Request) -> TrialRow:
    """A row for a trial that is running, so that strategies count it as tried: it has neither speed nor memory."""
    return unmeasured(request, "ok", "is running", 0.0)


def unmeasured(request: Request, outcome: TrialOutcome, reason: str, seconds: float) -> TrialRow:
    """The row of a trial of which nothing is known but this."""
    proposal, config = request.proposal, request.config
    return TrialRow(
        request.key, request.number, proposal.stage, proposal.round, proposal.candidate,
        config["global_batch"] // config["micro_batch"], outcome, reason, seconds, proposal.predicted_memory,
        proposal.predicted_speed, node=request.node, name=request.name,
    )  # fmt: skip


@dataclass
class Watch:
    """Follows a running trial step by step and decides when it ends. A cycle is one step here."""

    early: Early
    bar: float | None
    """Tokens per second below which the trial cannot win."""
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
        self.began = self.began or time.monotonic()
        self.seconds.append(report.train_seconds)

    def should_stop(self) -> bool:
        """Whether the step just launched is the last."""
        self.retries.append(_retries(self.limit.device))
        if self.limit.device.type == "cpu" and self.limit.used()[0] > self.limit.size:
            self.verdict = "over the limit"
        elif self.began and time.monotonic() - self.began > self.early.seconds:
            self.verdict = "time"
        else:
            bar_seconds = self.step_tokens / self.bar if self.bar else None
            precision = self.early.precision
            self.verdict = early_stop.verdict(self.counted(), bar_seconds=bar_seconds, precision=precision) or ""
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
    config = config_from_json(request.config, "the trial's config")
    if not config.stream:
        on_this_machine(StorageDir.of(config.data))


def run(request: Request) -> tuple[TrialRow, str | None]:
    """Run the trial: its row, and the traceback of one that failed; never raises for what the configuration does."""
    began = time.monotonic()
    config = config_from_json(request.config, "the trial's config")
    limit = watch = result = trace = None
    spent = Spent()
    try:
        choose_allocator(config)
        limit = Limit.impose(request.memory_limit, config.device) if request.memory_limit else None
        if request.early and limit:
            watch = Watch(request.early, request.proposal.bar, config.step_tokens, limit)
            trainer = Trainer(config, on_cycle=watch.on_cycle, should_stop=watch.should_stop)
        else:
            data = StreamData(config, stream_of(config)) if config.stream else None
            trainer = Trainer(config, data=data, limit=limit)
        spent = trainer.spent
        with Telemetry(lambda second, metrics: None) as telemetry:
            result = trainer.run()
        result = replace(result, telemetry=trainer.while_training(telemetry))
        if watch:
            watch.retries.append(_retries(watch.limit.device))
        outcome, reason = judge(result, watch)
    except UserError as refused:
        outcome, reason = "failed", str(refused).rstrip(".")
    except Exception as failure:  # noqa: BLE001 a trial that fails is a row like any other
        if isinstance(failure, OutOfMemory) or (isinstance(failure, RuntimeError) and is_exhausted(failure)):
            outcome, reason = "oom", first_line(failure)
        else:
            outcome, reason = "failed", f"{type(failure).__name__}: {first_line(failure)}"
            trace = traceback.format_exc()
    row = make_row(unmeasured(request, outcome, reason, 0.0), config, result, watch, spent, limit)
    return replace(row, seconds=time.monotonic() - began), trace


def judge(result: RunResult, watch: Watch | None = None) -> tuple[TrialOutcome, str]:
    """The outcome of a run that returned, and its reason in words; ``watch`` followed one that may end early."""
    if result.outcome in ("oom", "over_limit"):
        return result.outcome, result.reason
    if watch and (excess := watch.limit.excess()):
        return "over_limit", excess
    if result.impossible or result.outcome == "diverged":
        return "failed", result.impossible or result.reason
    if watch is None:
        if result.outcome != "finished":
            return "failed", f"{result.outcome}: {result.reason}"
        if result.throughput is None:
            return "failed", f"{result.steps} steps are too few to leave warm-up: give it more time or steps"
        return "ok", result.reason
    rejected = len(watch.rejected())
    if rejected >= THRASHING_STEPS:
        return "thrash", f"the allocator had to free its cache in {rejected} steps"
    measured = steady_state(watch.counted(), watch.step_tokens)
    if measured is None:
        in_time = " in the trial's time" if watch.verdict == "time" else ""
        more = ": raise --trial-time" if in_time else ""
        return "failed", f"only {len(watch.counted())} steps could be counted{in_time}, too few for a speed{more}"
    if watch.verdict == "cannot win":
        return "stopped", f"cannot reach {watch.bar:,.0f} tokens/s after {measured.steps} steps"
    ended = {"precise": "the interval is narrow enough", "time": "the trial's time is used up"}
    note = f"; {rejected} step rejected" if rejected else ""  # two are thrashing
    return "ok", ended.get(watch.verdict, f"ran its {result.steps} steps") + note


def make_row(
    row: TrialRow, config: TrainConfig, result: RunResult | None, watch: Watch | None = None,
    spent: Spent | None = None, limit: Limit | None = None,
) -> TrialRow:  # fmt: skip
    """``row``, which has the outcome, with whatever was measured before it."""
    measured = steady_state(watch.counted(), config.step_tokens) if watch else result and result.throughput
    impossible = bool(result and result.impossible)
    if impossible:
        measured = None
    used, source = limit.used() if limit else (None, None)
    steps = watch.seconds if watch else spent.steps if spent else []
    short = watch.verdict == "time" if watch else bool(result and result.outcome == "finished")
    row = replace(
        row, memory=used, memory_source=source, rejected_steps=len(watch.rejected()) if watch else 0,
        too_short=row.outcome == "failed" and measured is None and short and not impossible,
        step_tokens=config.step_tokens, step_seconds=steps,
        losses=[loss for cycle in spent.reports for loss in cycle.step_losses] if spent else [],
    )  # fmt: skip
    if measured:
        speed, flops = measured.tokens_per_second, per_token(config)
        peak = peak_flops(result.device, config.precision) if result else None
        row = replace(
            row, tokens_per_second=speed, low=measured.low, high=measured.high, flops_per_second=speed * flops,
            mfu=utilisation(speed, flops, peak, 1),
            compile_seconds=max(0.0, steps[0] - config.step_tokens / speed) if steps else None,
        )  # fmt: skip
    if result:
        memory = result.memory
        if not limit:
            row = replace(row, memory=memory.process, memory_source=memory.process_source)
        row = replace(
            row, allocated=memory.allocated, reserved=memory.reserved, allocator_retries=memory.allocator_retries,
            hfu=result.hfu, data_wait_fraction=result.data_wait_fraction, train_loss=result.train_loss,
            val_loss=result.val_loss, device=result.device, attention=result.attention, telemetry=result.telemetry,
        )  # fmt: skip
    return row


def _retries(device: torch.device) -> int:
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else 0
