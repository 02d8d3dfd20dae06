"""Entry: ``python -m train.loop.probe`` measures the memory of a custom model, for :mod:`train.estimate.custom`.

It reads the step of the smaller probe from stdin, as JSON, and writes the line between two probes to stdout.
"""

import json
import os
import sys
from dataclasses import replace

import torch

from infra.errors import UserError
from infra.schema import to_json
from train.config import Step, config_from_json
from train.estimate.custom import EXIT_USER_ERROR, MemoryFit
from train.loop import memory, oom
from train.loop.execution import (
    autocast_context,
    build_model,
    compile_model,
    configure_allocator,
    configure_determinism,
    enable_large_pages,
    torch_device,
)
from train.models.builders import builder_of
from train.models.optimizer import make_optimizer

SEED = 0
"""Seed of the weights, which do not affect memory."""
STEPS = 2
"""The second has the optimizer's state beside its activations."""


def probe(step: Step, larger: int) -> MemoryFit:
    """Take several of ``step`` at its micro-batch and at the ``larger`` one: the line that their peaks determine."""
    configure_allocator(step.execution.allocator)
    enable_large_pages(step.execution)
    configure_determinism(step.execution)
    device = torch_device(step.execution.device)
    torch.set_float32_matmul_precision("highest" if step.execution.precision == "fp32" else "high")
    make_optimizer(
        build_model(step.model, step.execution, step.optimization.optimizer, SEED, device),
        step.optimization,
        step.execution.offload_optimizer,
    )  # what these import is not the model's
    memory.reset_after_oom(replace(step.execution, compile="off"))
    baseline_peak = _peak(device)
    model = build_model(step.model, step.execution, step.optimization.optimizer, SEED, device)
    forward = compile_model(model, step.execution)
    optimizer = make_optimizer(model, step.optimization, step.execution.offload_optimizer)
    scaler = torch.amp.GradScaler(device.type, enabled=step.execution.precision == "fp16")
    peaks, held = [], dict[str, int]()
    for size in (step.batch.micro_batch, larger):
        tokens = torch.zeros(size, step.model.context_length, dtype=torch.int64, device=device)
        memory.reset_after_oom(replace(step.execution, compile="off"))
        for _ in range(STEPS):
            for _ in range(step.batch.accumulation):
                try:
                    with autocast_context(step.execution):
                        loss = forward(tokens, tokens)
                    scaler.scale(loss).backward()
                except Exception as failure:
                    stage = "measuring its memory"
                    error = builder_of(step.model).user_error(stage, failure)
                    if error is None or memory.is_oom_error(failure):
                        raise
                    raise error from failure
            held = oom.bytes_by_part(model, optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), step.optimization.clip_norm or 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none="set-to-none" not in step.execution.ablate)
        peaks.append(_peak(device) - baseline_peak)
    each = (peaks[1] - peaks[0]) / (larger - step.batch.micro_batch)
    fixed = peaks[0] - each * step.batch.micro_batch
    return MemoryFit(held["weights"], held["gradients"], held.get("optimizer", 0), fixed, each)


def _peak(device: torch.device) -> int:
    measured = memory.peak(device)
    return measured.process if measured.reserved is None else measured.reserved


if __name__ == "__main__":
    step = Step.from_resolved(config_from_json(json.loads(sys.stdin.read()), "the probe's step"))
    answer, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: PTH123, SIM115 where the model may print
    try:
        print(json.dumps(to_json(probe(step, 3 * step.batch.micro_batch))), file=answer, flush=True)
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
