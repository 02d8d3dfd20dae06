"""One cycle: steps, then validation, then a report; and the check whether its losses show that the run has diverged.

A cycle's numbers stay on the device until the next cycle has work queued there.
"""

import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.shards import Manifest
from train.config import Batch, Cycle
from train.loop import timing
from train.loop.validation import mean_loss
from train.models.parallel import Workers
from train.result import CycleReport
from train.run_files.checkpoint import to_host

ROOM = 256
"""Number of steps for whose losses a cycle has room at first, if its number of steps depends on the time."""


@dataclass
class RunningCycle:
    """A cycle whose numbers are still on the device."""

    first: int
    """Number of the run's steps before this cycle."""
    stop: int | None
    """The last step of the cycle; None while it is not known."""
    start: timing.Mark
    """When this process starts the cycle."""
    losses: Tensor
    """Mean loss of each step on this worker, in nats."""
    norms: Tensor
    """Gradient norm of each step before clipping; 0 if clipping is off."""
    resumed_steps: int = 0
    """Number of the cycle's steps before the run was interrupted; their losses are from the checkpoint."""
    backward_ends: list[timing.Mark] = field(default_factory=list)
    """When each step has its gradients and the optimizer begins."""
    step_ends: list[timing.Mark] = field(default_factory=list)
    """When each step ends."""
    batch_waits: list[tuple[timing.Mark, timing.Mark]] = field(default_factory=list)
    """Before and after each request for a batch; a GPU's two marks differ only while the GPU is idle."""
    val_losses: Tensor | None = None
    """Weighted validation losses of this worker by forward pass, as ``train.loop.validation.validate`` returns them."""
    val_windows: int = 0
    """Number of windows of the validation, over all workers."""
    end: timing.Mark = None
    """When the cycle's numbers have been copied to the host."""
    host_values: tuple[Tensor, Tensor, Tensor | None] | None = None
    """Valid once ``end`` is reached: the losses, the gradient norms, and the validation losses; worker means."""
    learning_rate: float = 0.0
    """Learning rate of the last step."""

    @property
    def steps(self) -> int:
        """Number of the cycle's steps so far, including those before an interruption."""
        return self.resumed_steps + len(self.step_ends)

    def make_room(self) -> None:
        """Double the room for the losses and norms of steps if the next step does not fit."""
        if self.steps == len(self.losses):
            self.losses = torch.cat([self.losses, torch.zeros_like(self.losses)])
            self.norms = torch.cat([self.norms, torch.zeros_like(self.norms)])

    def discard_unfinished_step(self, accumulation: int) -> None:
        """Remove the marks of a step that has not ended, which has ``accumulation`` micro-batches."""
        del self.batch_waits[accumulation * len(self.step_ends) :]

    @property
    def micro_batch_seconds(self) -> list[list[float]]:
        """Seconds of each micro-batch of each step, from the request for its batch; the last step must have ended.

        The marks around these requests serve here, too, so that timing micro-batches needs no others.
        """
        starts = [wait[0] for wait in self.batch_waits]
        per_step = len(starts) // max(1, len(self.step_ends))
        return [
            [
                timing.seconds_between(first, last)
                for first, last in itertools.pairwise([*starts[index * per_step : (index + 1) * per_step], end])
            ]
            for index, end in enumerate(self.backward_ends[: len(self.step_ends)])
        ]

    @property
    def step_norms(self) -> list[float]:
        """Gradient norm of each step; the cycle must be closed, and ``end`` reached."""
        assert self.host_values is not None, "only a closed cycle has values on the host"
        return self.host_values[1].tolist()

    @property
    def data_wait(self) -> list[float]:
        """Seconds that each step waited for its batches; the last step must have ended."""
        batch_waits = [timing.seconds_between(*wait) for wait in self.batch_waits]
        per_step = len(batch_waits) // max(1, len(self.step_ends))
        starts = range(0, per_step * len(self.step_ends), max(1, per_step))
        return [sum(batch_waits[start : start + per_step]) for start in starts]

    @property
    def optimizer_seconds(self) -> list[float]:
        """Seconds of clipping and the optimizer in each step; the last step must have ended."""
        return list(map(timing.seconds_between, self.backward_ends, self.step_ends))


def open_cycle(
    first: int, step: int, cycle: Cycle, unreported_losses: list[float], device: torch.device
) -> RunningCycle:
    """Return the cycle that continues at ``step`` after a report at ``first``, with the losses of the steps in
    between."""
    stop = cycle.last_step(step)
    losses, norms = torch.zeros(2, (step + ROOM if stop is None else stop) - first, device=device)
    losses[: len(unreported_losses)] = torch.tensor(unreported_losses)
    return RunningCycle(first, stop, timing.mark(device), losses, norms, resumed_steps=len(unreported_losses))


def close_cycle(cycle: RunningCycle, workers: Workers, device: torch.device) -> None:
    """Queue the copy of ``cycle``'s numbers to the host, so that reading them does not wait for a later step."""
    losses = to_host(workers.mean(cycle.losses[: cycle.steps]))
    validation = None if cycle.val_losses is None else to_host(workers.mean(cycle.val_losses))
    cycle.host_values = losses, to_host(cycle.norms[: cycle.steps]), validation
    cycle.end = timing.mark(device)


def step_seconds(cycle: RunningCycle) -> list[float]:
    """Return the seconds of each step of this process; waits for the last of them."""
    marks = [cycle.start, *cycle.step_ends]
    timing.wait_for(marks[-1])
    return [timing.seconds_between(a, b) for a, b in itertools.pairwise(marks)]


def report(
    cycle: RunningCycle, batch: Batch, context_length: int, manifest: Manifest, *, val_tokens: int, elapsed: float
) -> CycleReport:
    """Return the report of a closed cycle; ``val_tokens`` is the number of validation tokens before the cycle."""
    timing.wait_for(cycle.end)
    assert cycle.host_values is not None, "only a closed cycle is reported"
    step_losses, norms, validation = cycle.host_values
    losses = step_losses.tolist()
    val_losses = [] if validation is None else validation.tolist()
    process_steps = len(cycle.step_ends)
    val_windows = cycle.val_windows if val_losses else 0
    cycle_val_tokens = val_windows * context_length
    val_tokens += cycle_val_tokens
    train_seconds = timing.seconds_between(cycle.start, cycle.step_ends[-1])
    step = cycle.first + cycle.steps
    step_tokens = batch.global_batch * context_length
    train_tokens = step * step_tokens
    totals = manifest.splits["train"]
    return CycleReport(
        step=step,
        batches=step + val_tokens // step_tokens,
        train_loss=sum(losses) / len(losses),
        val_loss=mean_loss(val_losses, cycle.val_windows, batch) if val_losses else None,
        train_tokens=train_tokens,
        val_tokens=val_tokens,
        books_seen=train_tokens * totals["books"] // totals["tokens"],
        cycle_seconds=timing.seconds_between(cycle.start, cycle.end),
        train_seconds=train_seconds,
        data_wait_seconds=sum(cycle.data_wait),
        optimizer_seconds=sum(cycle.optimizer_seconds),
        elapsed=elapsed,
        cycle_tokens=process_steps * step_tokens + cycle_val_tokens,
        epoch_seconds=totals["tokens"] / (process_steps * step_tokens / train_seconds),
        learning_rate=cycle.learning_rate,
        gradient_norm=norms[-1].item(),
        step_losses=losses,
        val_windows=val_windows,
    )


def divergence_reason(losses: list[float], reference: float | None, spike: float, first: int) -> str | None:
    """Return why training must not continue after these ``losses``, which start after step ``first``; None if it may.

    ``reference`` is the mean loss of the previous cycle; a loss more than ``spike`` nats above it is a spike.
    """
    for step, loss in enumerate(losses, first + 1):
        if not math.isfinite(loss):
            return f"the loss is {loss} at step {step}"
        if spike and reference is not None and loss > reference + spike:
            jump = f"from {reference:.3f} (mean of the previous cycle) to {loss:.3f} at step {step}"
            return f"loss spiked {jump} (--max-loss-spike {spike:g})"
    return None
