"""Diagnose a run that did not fit in memory, and a custom model whose losses show a fault in its code.

A run that did not fit gets advice: the change that is predicted to fit at the lowest cost in speed. Sizes are in GB
(10^9 bytes).
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

from infra.cli.units import format_size
from infra.storage.directory import StorageDir
from train.config import Step
from train.estimate.advice import MemorySaving, find_memory_savings
from train.estimate.breakdown import MemoryBreakdown
from train.estimate.memory import peak_if_known
from train.model_config import ModelSpec
from train.result import BUILDING, Diagnosis, MemoryShortage, RunResult
from train.run_files.lookup import format_resume_command, format_run_command

LEARNING_STEPS = 100
"""Minimum number of steps without progress after which a model is diagnosed as not using its inputs."""

_TOLERANCE = 0.03
"""Relative difference up to which two losses are considered equal."""


def first_loss_fault(model: ModelSpec, loss: float | None) -> str:
    """Describe why the ``loss`` of a custom model's first step is too high for a mean; empty if it is not."""
    guess = math.log(model.vocab_size)
    if not model.user_code or loss is None or loss <= 2 * guess:
        return ""
    return (
        f"the first loss is {loss:,.1f}, but guessing among {model.vocab_size:,} token ids has a loss of {guess:.1f}. "
        f"Check that --model {model.user_code} returns the mean over all targets, not a sum, and that its initial "
        "weights are small"
    )


def of_losses(model: ModelSpec, result: RunResult) -> Diagnosis | None:
    """Diagnose faults in the code of a custom model from its losses; None if there are none."""
    if not model.user_code:
        return None
    rows = list[tuple[str, str]]()
    if fault := first_loss_fault(model, result.first_loss):
        rows.append(("first loss", fault))
    elif fault := _no_progress(model, result):
        rows.append(("no progress", fault))
    if result.val_loss is not None and not math.isfinite(result.val_loss):
        text = f"the validation loss is {result.val_loss}. Check --model {model.user_code} in evaluation mode, eval()"
        rows.append(("evaluation", text))
    return Diagnosis(rows) if rows else None


def _no_progress(model: ModelSpec, result: RunResult) -> str:
    """Describe that the second half of a run stays at the loss of a model that ignores its inputs; empty if it falls.

    A model that shifts the targets a second time also has this loss, because it must predict the id after the next.
    """
    half = result.loss_curve[(len(result.loss_curve) - 1) // 2 :]
    losses = [loss for _, loss, _ in half]
    if not half or half[-1][0] - half[0][0] < LEARNING_STEPS:
        return ""
    without_inputs = result.unigram_loss or math.log(model.vocab_size)
    if losses[-1] < (1 - _TOLERANCE) * max(losses) or min(losses) < (1 - _TOLERANCE) * without_inputs:
        return ""
    return (
        f"the loss stays at {losses[-1]:.2f} from step {half[0][0]:,} on; a model that ignores its inputs has a loss "
        f"of {without_inputs:.2f}. Check that --model {model.user_code} uses its inputs and does not shift the "
        "targets, which are already shifted by one position. If its code is correct, increase --learning-rate"
    )


def diagnose_oom(step: Step, result: RunResult, run_dir: StorageDir, memory_limit: int | None) -> Diagnosis | None:
    """Diagnose why the run in ``run_dir`` did not fit in memory, with changes that should fit; None if it fit."""
    shortage, breakdown = result.shortage, peak_if_known(step)
    if shortage is None or breakdown is None:
        return None
    rows = [("torch error", shortage.message)] if shortage.message else []
    shortfall = prediction_shortfall(breakdown, result, shortage)
    if shortfall:
        rows.append(("prediction", f"underestimated by {_gb(shortfall)}, which the predictions below include"))
    changes = [replace(change, peak=change.peak + shortfall) for change in find_memory_savings(step)]
    fitting: dict[str, MemorySaving] = {}
    for change in changes:
        if change.peak <= shortage.available_bytes and (len(change.flags) == 1 or not fitting):
            fitting.setdefault(change.text.split()[0], change)  # The first change of each flag is the cheapest.
    if not fitting:
        return Diagnosis(
            rows, format_no_fit(changes, breakdown.total + shortfall, shortage.available_bytes, memory_limit)
        )
    rows.append(("available", f"{_gb(shortage.available_bytes)} to the process; predicted with changes that fit:"))
    rows += [(change.text, f"{_gb(change.peak)}; {change.cost}") for change in fitting.values()]
    cheapest = next(iter(fitting.values()))
    verb = "resume from the last checkpoint" if result.checkpoint else "try again"
    advice = f"{verb} with {cheapest.text}, predicted to need {_gb(cheapest.peak)} ({cheapest.cost}): "
    return Diagnosis(rows, advice, retry_command(cheapest.text, result, run_dir, memory_limit))


def prediction_shortfall(breakdown: MemoryBreakdown, result: RunResult, shortage: MemoryShortage) -> int:
    """Return the bytes by which the ``breakdown`` was too low for this run, which needed more memory than available.

    The run needed at least the memory that it used and the allocation that failed, and also the optimizer's state if
    its first step had not run yet. While the model is built, only the weights are in memory.
    """
    required = result.memory.process + (shortage.requested_bytes or 0)
    if shortage.stage.startswith(BUILDING):
        return max(0, max(shortage.available_bytes, required) - breakdown.weights - breakdown.context)
    required += max(0, breakdown.optimizer - shortage.bytes_by_part.get("optimizer", breakdown.optimizer))
    return max(0, max(shortage.available_bytes, required) - breakdown.total)


def format_no_fit(
    changes: Sequence[MemorySaving], unchanged_peak: int, available: int, memory_limit: int | None
) -> str:
    """Format the message that no change is predicted to fit the ``available`` bytes, with the smallest prediction."""
    smallest = min(changes, key=lambda change: change.peak, default=None)
    peak, label = (smallest.peak, f"with {smallest.text}") if smallest else (unchanged_peak, "without further changes")
    alternative = "a larger --memory-limit" if memory_limit else "a device with more memory"
    return (
        f"no change is predicted to fit the available {_gb(available)}; the smallest prediction is {_gb(peak)} "
        f"{label}. Use a smaller --model or {alternative}"
    )


def retry_command(flag: str, result: RunResult, run_dir: StorageDir, memory_limit: int | None) -> str:
    """Format the command that resumes the run with an additional ``flag``, or restarts it if it has no checkpoint."""
    if result.checkpoint:
        command = format_resume_command(run_dir)
    else:
        command = format_run_command(run_dir / "config.json")
        if run_dir.parent != StorageDir.of("runs"):
            command += f" --out {shlex.quote(str(run_dir.parent))}"
    return f"{command} {flag}" + (f" --memory-limit {format_size(memory_limit)}" if memory_limit else "")


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"
