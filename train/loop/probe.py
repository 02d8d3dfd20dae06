"""Entry: ``python -m train.loop.probe`` measures the memory of a custom model, for :mod:`train.estimate.custom`.

It reads the step of the smaller probe from stdin, as JSON. To stdout it writes a line with the number of each
micro-batch when it starts, and then the fits of a step with one micro-batch and with several.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
ACCUMULATIONS = (1, 2)
"""Micro-batches per step that are measured; further ones need no more memory than the second."""
STEPS = 2
"""The second has the optimizer's state beside its activations."""


def probe(step: Step, larger: int, on_start: Callable[[int], object]) -> list[MemoryFit]:
    """Train steps with the micro-batch of ``step`` and with the ``larger`` one, and fit a line through their peaks.

    Args:
        step: a step of the smaller micro-batch.
        larger: the larger micro-batch.
        on_start: called with the number of each micro-batch, 1 and 2, before it trains.

    Returns: the fit without accumulation, and the fit with it, when gradients are in memory during a forward pass.
    """
    configure_allocator(step.execution.allocator)
    enable_large_pages(step.execution)
    configure_determinism(step.execution)
    device = torch_device(step.execution.device)
    torch.set_float32_matmul_precision("highest" if step.execution.precision == "fp32" else "high")
    make_optimizer(
        build_model(step.model, step.execution, step.optimization.optimizer, SEED, device),
        step.optimization,
        offload=step.execution.offload_optimizer,
    )  # what these import is not the model's
    memory.reset_after_oom(replace(step.execution, compile="off"))
    baseline_peak = _peak(device)
    model = build_model(step.model, step.execution, step.optimization.optimizer, SEED, device)
    forward = compile_model(model, step.execution)
    optimizer = make_optimizer(model, step.optimization, offload=step.execution.offload_optimizer)
    peaks: dict[int, list[int]] = {accumulation: [] for accumulation in ACCUMULATIONS}
    held = dict[str, int]()
    sizes = (step.batch.micro_batch, larger)
    for number, size in enumerate(sizes, 1):
        on_start(number)
        tokens = torch.zeros(size, step.model.context_length, dtype=torch.int64, device=device)
        for accumulation in ACCUMULATIONS:
            memory.reset_after_oom(replace(step.execution, compile="off"))
            held = _train(step, accumulation, tokens, (model, forward, optimizer))
            peaks[accumulation].append(_peak(device) - baseline_peak)
    return [_fit(sizes, peaks[accumulation], held) for accumulation in ACCUMULATIONS]


def _train(
    step: Step, accumulation: int, tokens: Tensor, parts: tuple[nn.Module, Callable[..., Tensor], Optimizer]
) -> dict[str, int]:
    """Train ``STEPS`` steps of ``tokens`` with the model, its forward function and the optimizer in ``parts``.

    Returns: the bytes of the weights, the gradients and the optimizer's state.
    """
    model, forward, optimizer = parts
    scaler, held = torch.amp.GradScaler(tokens.device.type, enabled=step.execution.precision == "fp16"), {}
    for _ in range(STEPS):
        for _ in range(accumulation):
            try:
                with autocast_context(step.execution):
                    loss = forward(tokens, tokens)
                scaler.scale(loss).backward()
            except Exception as failure:
                error = builder_of(step.model).user_error("measuring its memory", failure)
                if error is None or memory.is_oom_error(failure):
                    raise
                raise error from failure
        held = oom.bytes_by_part(model, optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), step.optimization.clip_norm or 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none="set-to-none" not in step.execution.ablate)
    return held


def _fit(sizes: tuple[int, int], peaks: list[int], held: dict[str, int]) -> MemoryFit:
    per_sequence = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    fixed = peaks[0] - per_sequence * sizes[0]
    return MemoryFit(held["weights"], held["gradients"], held.get("optimizer", 0), fixed, per_sequence)


def _peak(device: torch.device) -> int:
    measured = memory.peak(device)
    return measured.process if measured.reserved is None else measured.reserved


if __name__ == "__main__":
    step = Step.from_resolved(config_from_json(json.loads(sys.stdin.read()), "the probe's step"))
    answer, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: PTH123, SIM115 where the model may print
    write_line = partial(print, file=answer, flush=True)
    try:
        write_line(json.dumps([to_json(fit) for fit in probe(step, 3 * step.batch.micro_batch, write_line)]))
    except UserError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
