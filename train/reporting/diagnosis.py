"""The diagnosis of a run: why it did not fit in memory, and what the losses of a custom model say about its code.

A run that did not fit gets the change that should help at the lowest cost in speed.

Sizes are in GB of 10^9 bytes, as in limits.
"""

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

from infra.cli.units import format_size
from infra.storage.directory import StorageDir
from train.config import ResolvedConfig
from train.estimate.advice import MemorySaving, find_memory_savings
from train.estimate.memory import peak_if_known, predict_peak
from train.model_config import ModelSpec
from train.result import BUILDING, Diagnosis, MemoryShortage, RunResult
from train.run_files.lookup import format_resume_command, format_run_command

LEARNING_STEPS = 100
"""Steps without progress after which a model that has not learned to use its inputs is told so."""

_TOLERANCE = 0.03
"""Share of a loss within which it does not fall, or is no lower than another."""


def first_loss_fault(model: ModelSpec, loss: float | None) -> str:
    """Why the ``loss`` of the first step of a custom model is not a mean over its ids; empty where it can be one."""
    guess = math.log(model.vocab_size)
    if not model.user_code or loss is None or loss <= 2 * guess:
        return ""
    return (
        f"the first loss is {loss:,.1f}, and a guess among {model.vocab_size:,} ids has {guess:.1f}: check that "
        f"--model {model.user_code} returns the mean over all targets and not a sum, and that its initial "
        "weights are small"
    )


def of_losses(model: ModelSpec, result: RunResult) -> Diagnosis | None:
    """What the losses of a custom model say is wrong with its code; None where nothing is."""
    if not model.user_code:
        return None
    rows = list[tuple[str, str]]()
    if fault := first_loss_fault(model, result.first_loss):
        rows.append(("first loss", fault))
    elif fault := _no_progress(model, result):
        rows.append(("nothing learned", fault))
    if result.val_loss is not None and not math.isfinite(result.val_loss):
        text = f"the validation loss is {result.val_loss}: check what --model {model.user_code} does in model.eval()"
        rows.append(("evaluation", text))
    return Diagnosis(rows) if rows else None


def _no_progress(model: ModelSpec, result: RunResult) -> str:
    """That the second half of a run stays at the loss of a model that does not use its inputs; empty where it falls.

    Targets that the model shifts once more have this loss, because what is to be predicted is then two ids away. A
    good model passes it on its way.
    """
    half = result.loss_curve[(len(result.loss_curve) - 1) // 2 :]
    losses = [loss for _, loss, _ in half]
    if not half or half[-1][0] - half[0][0] < LEARNING_STEPS:
        return ""
    without_inputs = result.unigram_loss or math.log(model.vocab_size)
    if losses[-1] < (1 - _TOLERANCE) * max(losses) or min(losses) < (1 - _TOLERANCE) * without_inputs:
        return ""
    return (
        f"the loss stays at {losses[-1]:.2f} from step {half[0][0]:,} on, and a model that does not use its inputs has "
        f"{without_inputs:.2f}: check that --model {model.user_code} uses them, and that it does not shift the "
        "targets, which are one position later already; else raise --learning-rate"
    )


def diagnose_oom(
    config: ResolvedConfig, result: RunResult, run_dir: StorageDir, memory_limit: int | None
) -> Diagnosis | None:
    """The reason why the run in ``run_dir`` did not fit in memory, and changes that should fit; None if it did fit."""
    shortage = result.shortage
    if shortage is None or peak_if_known(config) is None:
        return None
    rows = [("torch error", shortage.message)] if shortage.message else []
    shortfall = prediction_shortfall(config, result, shortage)
    if shortfall:
        rows.append(("prediction", f"underestimated by {_gb(shortfall)}, which the predictions below include"))
    changes = [replace(change, peak=change.peak + shortfall) for change in find_memory_savings(config)]
    fitting: dict[str, MemorySaving] = {}
    for change in changes:
        if change.peak <= shortage.available_bytes and (len(change.flags) == 1 or not fitting):
            fitting.setdefault(change.text.split()[0], change)  # The first change of each flag is the cheapest.
    if not fitting:
        return Diagnosis(
            rows, format_no_fit(changes, predict_peak(config).total + shortfall, shortage.available_bytes, memory_limit)
        )
    rows.append(("available", f"{_gb(shortage.available_bytes)} to the process; predicted with changes that fit:"))
    rows += [(change.text, f"{_gb(change.peak)}; {change.cost}") for change in fitting.values()]
    first = next(iter(fitting.values()))
    verb = "resume from the last checkpoint" if result.checkpoint else "try again"
    advice = f"{verb} with {first.text}, predicted to need {_gb(first.peak)} ({first.cost}): "
    return Diagnosis(rows, advice, retry_command(first.text, result, run_dir, memory_limit))


def prediction_shortfall(config: ResolvedConfig, result: RunResult, shortage: MemoryShortage) -> int:
    """Bytes by which the prediction was too low for this run, which needed more memory than available.

    The run needed at least what it had plus what it failed to allocate, and the optimizer's state if its first step had
    not run yet. While the model is built, only the weights are in memory.
    """
    breakdown, needed = predict_peak(config), result.memory.process + (shortage.requested_bytes or 0)
    if shortage.stage.startswith(BUILDING):
        return max(0, max(shortage.available_bytes, needed) - breakdown.weights - breakdown.context)
    needed += max(0, breakdown.optimizer - shortage.bytes_by_part.get("optimizer", breakdown.optimizer))
    return max(0, max(shortage.available_bytes, needed) - breakdown.total)


def format_no_fit(
    changes: Sequence[MemorySaving], unchanged_peak: int, available: int, memory_limit: int | None
) -> str:
    """The message that no change is predicted to fit the ``available`` bytes, with the smallest prediction."""
    smallest = min(changes, key=lambda change: change.peak, default=None)
    peak, label = (smallest.peak, f"with {smallest.text}") if smallest else (unchanged_peak, "without further changes")
    alternative = "a larger --memory-limit" if memory_limit else "a device with more memory"
    return (
        f"no change is predicted to fit the available {_gb(available)}: the smallest prediction is {_gb(peak)} "
        f"{label}; use a smaller --model or {alternative}"
    )


def retry_command(flag: str, result: RunResult, run_dir: StorageDir, memory_limit: int | None) -> str:
    """The command that resumes the run with an additional ``flag``, or starts it again if it has no checkpoint."""
    if result.checkpoint:
        line = format_resume_command(run_dir)
    else:
        line = format_run_command(run_dir / "config.json")
        if run_dir.parent != StorageDir.of("runs"):
            line += f" --out {shlex.quote(str(run_dir.parent))}"
    return f"{line} {flag}" + (f" --memory-limit {format_size(memory_limit)}" if memory_limit else "")


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"
