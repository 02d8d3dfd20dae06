"""The estimates of a custom model. No formula describes its memory, which is a linear fit through two small probes.

A separate process builds the model like a run and trains a few steps with each of two micro-batches on this machine's
device, so that no memory of the probes stays in the command's process. It only runs if a bound on the memory, which the
inspection of the model gives, does not answer the question.
"""

import json
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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

TENSOR_COPIES = 2
"""Bound on the peak of activations, as a multiple of the tensors that a forward pass creates and saves. A bigram, for
example, needed 0.8 times their bytes: its logits, their logarithms, and a gradient."""

STATE_BYTES = 32
"""Bound on the bytes for each parameter: weight, gradient and two moments in fp32, twice, because a step of the
optimizer may need copies."""

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

    def peak_bound(self, step: Step) -> float:
        """Return a bound on the peak by the tensors of a forward pass of one sequence; infinite if they are
        unknown."""
        info = self.model.info
        if not (info and info.tensor_bytes):
            return math.inf
        tensors = info.tensor_bytes * step.batch.micro_batch
        return TENSOR_COPIES * tensors + STATE_BYTES * info.parameters + CONTEXT[step.execution.device]

    def predict_peak(self, step: Step) -> MemoryBreakdown:
        """Return the peak of ``step`` on one worker by part, by the fit of :func:`measure_fit`."""
        fit = measure_fit(step)
        state = fit.weights + fit.gradients + fit.optimizer
        return MemoryBreakdown(
            weights=fit.weights, gradients=fit.gradients, optimizer=fit.optimizer, casts=0,
            activations=fit.peak(step.batch.micro_batch) - state, logits=0, working=0, workspace=0, unused=0,
            context=CONTEXT[step.execution.device], moment="the peak of measured steps",
        )  # fmt: skip

    def activation_formula(self, micro_batch: int, precision: Precision) -> None:
        """Return None, because a custom model has no published formula."""

    def roofline_speed(self, batch: Batch, execution: Execution, gpu_rates: GpuRates) -> float:
        """Raise ``UserError``, because no formulas describe the kernels of a custom model."""
        raise UserError("The speed is only predicted for GPT-2, because the formulas describe its kernels.")

    def is_launch_bound(self, batch: Batch, execution: Execution, gpu_rates: GpuRates) -> bool:
        """Return False, because the number of a custom model's kernels is unknown."""
        return False


_fits: dict[Step, list[MemoryFit]] = {}


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
        _fits[probe] = _measure_fits(probe)
    return _fits[probe][step.batch.accumulation > 1]


def _probe_step(step: Step) -> Step:
    """Return a step of the smaller probe, which is equal for all steps that one process measures.

    The process measures a step without accumulation, and one with it, when gradients are in memory during a forward
    pass.
    """
    size = -(-TOKENS // step.model.context_length)
    ablate = tuple(
        name for name in step.execution.ablate if name in ("set-to-none", "large-pages")
    )  # The others do not affect memory.
    return step.replace(micro_batch=size, global_batch=size, workers=1, fsdp=False, accelerator=None, ablate=ablate)


def _measure_fits(step: Step) -> list[MemoryFit]:
    """Run the probe's process, and show which of its two micro-batches trains.

    Returns: the fit without accumulation, and the fit with it.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    line = ""
    with process, status("measuring the model's memory") as live_status, ThreadPoolExecutor(1) as reader:
        assert process.stdin, "it is a pipe"
        assert process.stdout, "it is a pipe"
        assert process.stderr, "it is a pipe"
        errors = reader.submit(process.stderr.read)
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(step.to_json()))
        for line in process.stdout:
            if line.strip().isdecimal():
                live_status.update(f"measuring the model's memory with micro-batch {line.strip()} of 2")
        error_lines = errors.result().strip().splitlines()
    if process.returncode or not line.startswith("["):
        last_line = (error_lines or ["the probe printed nothing"])[-1]
        if process.returncode == EXIT_USER_ERROR:
            raise UserError(last_line)
        is_killed = process.returncode == -signal.SIGKILL
        reason = "the probe was killed, probably because memory ran out" if is_killed else last_line
        raise UserError(
            f"--model {step.model.text}: measuring its memory failed: {reason.rstrip('.')}. Set "
            "--micro-batch, with which a run does not need the measurement."
        )
    fits: list[Any] = json.loads(line)
    return [from_json(MemoryFit, values, "the probe") for values in fits]
