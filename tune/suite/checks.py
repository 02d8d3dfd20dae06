"""Checks of a ladder's runs: that a rung has an effect on the device, and that the baseline has a speed."""

import math

from infra.device.hardware import DeviceInfo
from infra.errors import UserError
from train.config import AUTO, GPU_KERNELS, HALF_PRECISIONS, Execution
from train.loop.pace import MIN_TRAIN_SHARE
from tune.config import MIN_RUNG_STEPS
from tune.suite.batches import RETRIES, TOO_LARGE
from tune.suite.suites import Changes
from tune.trial.row import TrialRow


def check_single_worker(workers: int) -> None:
    """Raise ``UserError`` for more than one worker."""
    if workers > 1:
        raise UserError(f"--workers {workers} is not supported, because a ladder measures one device. Use --workers 1.")


def check_suits_device(changes: Changes, execution: Execution, previous: Execution, device_info: DeviceInfo) -> None:
    """Raise ``UserError`` if a rung's ``changes`` have no measurable effect on the device.

    The changes lead from the ``previous`` rung's execution to ``execution``. The messages are reasons in the table of
    results, so they have neither a capital letter nor a period.
    """
    if execution.device == "cuda":
        if set(execution.ablate) ^ set(previous.ablate) == {"large-pages"}:
            raise UserError("large pages only apply to CPU memory")
        return
    if changes.get("precision") == "tf32":
        raise UserError("TF32 only exists on GPUs; a CPU would compute in fp32")
    if execution.precision in HALF_PRECISIONS and not device_info.bf16:
        raise UserError(f"this CPU only emulates {execution.precision}, which is far slower than fp32")
    if execution.compile in GPU_KERNELS:
        raise UserError(f"--compile {execution.compile} tunes GPU kernels")
    if changes.get("attention") == AUTO:
        raise UserError("a CPU supports only one fused attention kernel, which is already used")


def check_baseline_speed(row: TrialRow, reason: str, *, fitted: bool = False) -> None:
    """Raise ``UserError`` if the baseline failed, or was too short to measure a speed.

    With ``fitted`` smaller batches have been tried.
    """
    steps = row.step_seconds
    if row.ended_too_early or (row.speed and len(steps) < MIN_RUNG_STEPS):
        seconds = sum(steps[1:]) / (len(steps) - 1) if len(steps) > 1 else sum(steps)
        budget = math.ceil(MIN_RUNG_STEPS * seconds / MIN_TRAIN_SHARE)  # The rest may be needed for the validation.
        raise UserError(
            f"The baseline made only {len(steps)} steps in {sum(steps[1:]):.1f} s; a rung needs {MIN_RUNG_STEPS} to "
            f"get past warm-up. Use --time-budget {budget}s or more."
        )
    if not row.speed:
        advice = "Fix the cause, or choose another --suite."
        if row.outcome in TOO_LARGE and fitted:
            advice = f"{RETRIES} smaller batches did not fit either. Use a larger --memory-limit or a smaller --model."
        elif row.outcome in TOO_LARGE:
            advice = "Use --fit-batch with --memory-limit for the largest batch that fits."
        raise UserError(f"The baseline failed: {reason}. {advice}")
