"""One cycle: steps, then validation, then a report; and the check whether its losses show that the run has diverged.

A cycle's numbers stay on the device until the next cycle has work queued there. Cycles end at multiples of the config's
length, wherever the run was interrupted, so that a continued run reports the same as an uninterrupted one.
"""

import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeline.shards import Manifest
from train.config import Batch
from train.loop import timing
from train.loop.validation import mean_loss
from train.models.parallel import Workers
from train.result import CycleReport
from train.run_files.checkpoint import to_host


@dataclass
class RunningCycle:
    """A cycle whose numbers are still on the device."""

    first: int
    """Steps before it."""
    stop: int
    """The step it ends at, at the latest."""
    start: timing.Mark
    losses: Tensor
    norms: Tensor
    resumed_steps: int = 0
    """Steps of it that an interrupted run did, whose losses come from the checkpoint."""
    backward_ends: list[timing.Mark] = field(default_factory=list)
    """When each step has its gradients and the optimizer begins."""
    step_ends: list[timing.Mark] = field(default_factory=list)
    """When each step ends."""
    batch_waits: list[tuple[timing.Mark, timing.Mark]] = field(default_factory=list)
    """Before and after each request for a batch: on a GPU's timeline they differ only while it has nothing to do."""
    val_losses: Tensor | None = None
    """What :func:`train.loop.validation.validate` returns, over ``val_windows`` windows of all workers."""
    val_windows: int = 0
    end: timing.Mark = None
    host_values: tuple[Tensor, Tensor, Tensor | None] | None = None
    """Valid once ``end`` is reached: the losses, the last gradient norm, and the validation losses; worker means."""
    learning_rate: float = 0.0

    @property
    def steps(self) -> int:
        """Steps so far, including earlier ones."""
        return self.resumed_steps + len(self.step_ends)

    @property
    def data_wait(self) -> list[float]:
        """Seconds that each step waited for its batches; the last step must have ended."""
        batch_waits = [timing.seconds_between(*wait) for wait in self.batch_waits]
        each = len(batch_waits) // max(1, len(self.step_ends))
        return [sum(batch_waits[first : first + each]) for first in range(0, each * len(self.step_ends), max(1, each))]

    @property
    def optimizer_seconds(self) -> list[float]:
        """Seconds of clipping and the optimizer in each step; the last step must have ended."""
        return list(map(timing.seconds_between, self.backward_ends, self.step_ends))


def open_cycle(
    first: int, step: int, length: int, unreported_losses: list[float], device: torch.device
) -> RunningCycle:
    """The cycle that continues at ``step`` after a report at ``first``, with the losses of the steps in between."""
    stop = (step // length + 1) * length
    losses, norms = torch.zeros(2, stop - first, device=device)
    losses[: len(unreported_losses)] = torch.tensor(unreported_losses)
    return RunningCycle(first, stop, timing.mark(device), losses, norms, resumed_steps=len(unreported_losses))


def close_cycle(cycle: RunningCycle, workers: Workers, device: torch.device) -> None:
    """Queue the copy of ``cycle``'s numbers to the host, so that reading them does not wait for a later step."""
    losses = to_host(workers.mean(cycle.losses[: cycle.steps]))
    validation = None if cycle.val_losses is None else to_host(workers.mean(cycle.val_losses))
    cycle.host_values = losses, to_host(cycle.norms[cycle.steps - 1]), validation
    cycle.end = timing.mark(device)


def step_seconds(cycle: RunningCycle) -> list[float]:
    """Seconds of each step of this process; waits for the last of them."""
    moments = [cycle.start, *cycle.step_ends]
    timing.wait_for(moments[-1])
    return [timing.seconds_between(a, b) for a, b in itertools.pairwise(moments)]


def report(
    cycle: RunningCycle, batch: Batch, context_length: int, manifest: Manifest, *, val_tokens: int, elapsed: float
) -> CycleReport:
    """The numbers of a closed cycle; ``val_tokens`` is the number before it."""
    timing.wait_for(cycle.end)
    assert cycle.host_values is not None, "only a closed cycle is reported"
    step_losses, norm, validation = cycle.host_values
    losses = step_losses.tolist()
    val_losses = [] if validation is None else validation.tolist()
    here = len(cycle.step_ends)
    cycle_val_tokens = cycle.val_windows * context_length
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
        books_seen=train_tokens * totals["books"] / totals["tokens"],
        cycle_seconds=timing.seconds_between(cycle.start, cycle.end),
        train_seconds=train_seconds,
        data_wait_seconds=sum(cycle.data_wait),
        optimizer_seconds=sum(cycle.optimizer_seconds),
        elapsed=elapsed,
        cycle_tokens=here * step_tokens + cycle_val_tokens,
        epoch_seconds=totals["tokens"] / (here * step_tokens / train_seconds),
        learning_rate=cycle.learning_rate,
        gradient_norm=norm.item(),
        step_losses=losses,
    )


def divergence_reason(losses: list[float], reference: float | None, spike: float, first: int) -> str | None:
    """Why training must not continue after these ``losses``, which start after step ``first``; None if it may.

    ``reference`` is the mean loss of the previous cycle; a loss more than ``spike`` nats above it is a spike.
    """
    for step, loss in enumerate(losses, first + 1):
        if not math.isfinite(loss):
            return f"the loss is {loss} at step {step}"
        if spike and reference is not None and loss > reference + spike:
            jump = f"from {reference:.3f} (mean of the previous cycle) to {loss:.3f} at step {step}"
            return f"loss spiked {jump} (--max-loss-spike {spike:g})"
    return None
