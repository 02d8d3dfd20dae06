"""Describe the memory shortage of a run: the failed allocation, the stage, and the sizes of the tensors in memory."""

import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from infra.cli.units import parse_size
from infra.device import host
from infra.device.gpu import GpuState, read_gpu
from infra.errors import first_line
from train.config import Step
from train.estimate.memory import peak_if_known
from train.loop.memory_limit import MemoryLimit
from train.models import parallel
from train.models.blocks import LossModel
from train.result import MemoryShortage, RunResult


class OutOfMemory(RuntimeError):
    """Memory ran out where the loop cannot return: before its first step, or while other workers wait for this one."""

    @property
    def result(self) -> RunResult:
        return self.args[0]

    def __str__(self) -> str:
        return self.result.reason


def over_limit(model: nn.Module, optimizer: torch.optim.Optimizer, limit: MemoryLimit, step: int) -> MemoryShortage:
    """Return the memory shortage of a run that exceeded its limit after ``step``, when its gradients had been freed."""
    now = bytes_by_part(model, optimizer)
    del now["gradients"]
    return MemoryShortage(f"checking memory after step {step}", None, limit.usable_bytes, now)


def out_of_memory(
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    limit: MemoryLimit | None,
    device: torch.device,
    stage: str,
    failure: Exception,
) -> MemoryShortage:
    """Return the memory shortage of a run that failed with ``failure`` in ``stage``; parts not built yet are None."""
    frames = traceback.walk_tb(failure.__traceback__)
    is_loss = isinstance(model, LossModel) and any(
        frame.f_code is type(model).mean_loss.__code__ for frame, _ in frames
    )
    if is_loss:  # Compiled code has other frames.
        stage = f"{stage} (computing the loss)"
    available = limit.usable_bytes if limit else available_bytes(device)
    return MemoryShortage(
        stage, failed_allocation_bytes(failure), available, bytes_by_part(model, optimizer), first_line(failure)
    )


def format_oom(shortage: MemoryShortage, step: Step, limit: MemoryLimit | None) -> str:
    """Format the reason of a run that ran out of memory, with its predicted peak and its limit if it has one."""
    text = f"out of memory while {shortage.stage}"
    if shortage.requested_bytes is not None:
        text += f", allocating {shortage.requested_bytes / 1e9:,.2f} GB"
    breakdown = peak_if_known(step)
    sizes = [f"predicted peak {breakdown.total / 1e9:,.2f} GB"] if breakdown else []
    sizes += [f"limit {limit.size / 1e9:.2f} GB"] if limit else []
    return text + (f" ({', '.join(sizes)})" if sizes else "")


def failed_allocation_bytes(failure: Exception) -> int | None:
    """Return the bytes of the failed allocation by torch's message; None if the message does not contain them."""
    match = re.search(r"tried to allocate ([\d.]+) (bytes|[KMG]iB)", str(failure), re.IGNORECASE)
    return parse_size(f"{match[1]} {match[2].replace('bytes', 'B')}") if match else None


def available_bytes(device: torch.device, read_gpu: Callable[[int], GpuState | None] = read_gpu) -> int:
    """Return the bytes of ``device`` that this process can use: on a GPU without other processes' memory, if NVML
    reports it."""
    if device.type != "cuda":
        return host.total_memory()
    state = read_gpu(device.index or 0)
    if state and state.process_memory and state.memory_used is not None:
        return state.memory_total - (state.memory_used - state.process_memory)
    return torch.cuda.get_device_properties(device).total_memory


def bytes_by_part(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Return the bytes of this worker's weights, gradients and optimizer state now; parts of unknown size are
    absent."""
    parameters = list(model.parameters()) if model else []
    sizes = {"weights": _bytes(parameters), "gradients": _bytes(p.grad for p in parameters if p.grad is not None)}
    devices = {parameter.device for parameter in parameters}  # An offloaded state is on another one.
    state = [tensor for tensor in _tensors(optimizer.state_dict()) if tensor.device in devices] if optimizer else []
    if all(
        type(parallel.local_shard(tensor)) is Tensor for tensor in state
    ):  # torchao's 8-bit tensors do not show their size
        sizes["optimizer"] = _bytes(state)
    return sizes


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(parallel.local_shard(tensor).nbytes for tensor in tensors)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
