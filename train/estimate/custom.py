"""The estimates of a custom model. No formula describes its memory, which is a linear fit through two small probes.

A separate process builds the model like a run and trains two steps with each of two micro-batches on this machine's
device, so that no memory of the probes stays in the command's process.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from infra.cli.progress import status
from infra.device.hardware import device_info
from infra.errors import UserError
from infra.schema import from_json, strict
from train.config import Batch, Execution, Precision, Step
from train.estimate.breakdown import CONTEXT, MemoryBreakdown
from train.estimate.gpu_rates import GpuRates
from train.model_config.custom import CustomModel

TOKENS = 1024
"""Minimum number of tokens in the smaller probe's micro-batch; the larger probe has three times as many."""

PROGRAM = "train.loop.probe"
"""The probe's module. It is in an upper layer, so it is not imported but runs in another process."""

EXIT_USER_ERROR = 2
"""Exit code of the probe for an invalid model; its last line on stderr is the message."""


@strict
@dataclass(frozen=True)
class MemoryFit:
    """A linear fit of a process's peak bytes without its context, and the bytes of the model's state."""

    weights: int
    """Bytes of the weights."""
    gradients: int
    """Bytes of the gradients."""
    optimizer: int
    """Bytes of the optimizer's state; 0 if they are unknown."""
    fixed: float
    """Predicted peak bytes at a micro-batch of 0, which is the intercept of the fit."""
    per_sequence: float
    """Peak bytes for each sequence of a micro-batch, which is the slope of the fit."""

    def peak(self, micro_batch: int) -> int:
        """Return the peak bytes with ``micro_batch`` sequences; at least the weights, gradients and optimizer state."""
        return round(max(self.weights + self.gradients + self.optimizer, self.fixed + self.per_sequence * micro_batch))


@dataclass(frozen=True)
class CustomModelEstimates:
    """Predictions for a custom model."""

    model: CustomModel

    def is_memory_known(self, step: Step) -> bool:
        """Return whether this process has measured the memory of ``step``."""
        return _probe_step(step) in _fits

    def predict_peak(self, step: Step) -> MemoryBreakdown:
        """Return the peak of ``step`` on one worker by part, by the fit of :func:`measure_fit`."""
        fit = measure_fit(step)
        state = fit.weights + fit.gradients + fit.optimizer
        return MemoryBreakdown(
            weights=fit.weights, gradients=fit.gradients, optimizer=fit.optimizer, casts=0,
            activations=fit.peak(step.batch.micro_batch) - state, logits=0, working=0, workspace=0, unused=0,
            context=CONTEXT[step.execution.device], moment="the peak of two measured steps",
        )  # fmt: skip

    def activation_formula(self, micro_batch: int, precision: Precision) -> None:
        """Return None, because a custom model has no published formula."""

    def roofline_speed(self, batch: Batch, execution: Execution, gpu_rates: GpuRates) -> float:
        """Raise ``UserError``, because no formulas describe the kernels of a custom model."""
        raise UserError("The speed is only predicted for GPT-2, because the formulas describe its kernels.")


_fits: dict[Step, MemoryFit] = {}


def measure_fit(step: Step) -> MemoryFit:
    """Return the fit of ``step``, measured once. Raises ``UserError`` if its device is not in this machine or it
    fails."""
    probe = _probe_step(step)
    if probe not in _fits:
        if step.execution.device == "cuda" and device_info().kind != "cuda":
            raise UserError(
                f"--model {step.model.user_code}: its memory must be measured, but this machine has no GPU. "
                "Set --micro-batch, or run the command on the machine that trains."
            )
        with status("measuring the model's memory with two small micro-batches"):
            _fits[probe] = _measure_fit(probe)
    return _fits[probe]


def _probe_step(step: Step) -> Step:
    """Return a step of the smaller probe, which is equal for all steps with the same fit.

    It accumulates two micro-batches if ``step`` accumulates, because gradients are then in memory during the second.
    """
    size = -(-TOKENS // step.model.context_length)
    ablate = tuple(
        name for name in step.execution.ablate if name in ("set-to-none", "large-pages")
    )  # The others do not affect memory.
    return step.replace(
        micro_batch=size, global_batch=min(2, step.batch.accumulation) * size, workers=1, fsdp=False,
        accelerator=None, ablate=ablate,
    )  # fmt: skip


def _measure_fit(step: Step) -> MemoryFit:
    process = subprocess.run(
        [sys.executable, "-P", "-m", PROGRAM], input=json.dumps(step.to_json()), capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    output: list[str] = process.stdout.splitlines()
    if process.returncode or not output:
        last_line = (process.stderr.strip().splitlines() or ["the probe printed nothing"])[-1]
        if process.returncode == EXIT_USER_ERROR:
            raise UserError(last_line)
        is_killed = process.returncode == -signal.SIGKILL
        reason = "the probe was killed, probably because memory ran out" if is_killed else last_line
        raise UserError(
            f"--model {step.model.text}: measuring its memory failed: {reason.rstrip('.')}. Set "
            "--micro-batch, with which a run does not need the measurement."
        )
    values: dict[str, Any] = json.loads(output[-1])
    return from_json(MemoryFit, values, "the probe")
