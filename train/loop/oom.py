"""What is known about the memory of a run that did not fit: what failed, where, and what the worker held."""

import re
import traceback
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from infra.cli.units import parse_size
from infra.device import host
from infra.device.gpu import read_gpu
from infra.errors import first_line
from train.config import TrainConfig
from train.estimate.memory import known_peak
from train.loop.memory_limit import Limit
from train.models import parallel
from train.models.gpt2 import GPT
from train.result import RunResult, Shortage


class OutOfMemory(RuntimeError):
    """Memory ran out where the loop cannot return: before its first step, or while other workers wait for this one."""

    @property
    def result(self) -> RunResult:
        return self.args[0]

    def __str__(self) -> str:
        return self.result.reason


def over_limit(model: nn.Module, optimizer: torch.optim.Optimizer, limit: Limit, step: int) -> Shortage:
    """Of a run that was found to be over its limit after ``step``, which has freed its gradients."""
    now = held(model, optimizer)
    del now["gradients"]
    return Shortage(f"the check after step {step}", None, limit.room, now)


def out_of_memory(
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    limit: Limit | None,
    device: torch.device,
    stage: str,
    failure: Exception,
) -> Shortage:
    """Of a run that ran out of memory by ``failure`` while it was in ``stage``, with what had been built by then."""
    frames = traceback.walk_tb(failure.__traceback__)
    if any(frame.f_code is GPT.mean_loss.__code__ for frame, _ in frames):  # compiled code has other frames
        stage = f"the loss in {stage}"
    room = limit.room if limit else available(device)
    return Shortage(stage, tried_to_allocate(failure), room, held(model, optimizer), first_line(failure))


def reason(shortage: Shortage, config: TrainConfig, limit: Limit | None) -> str:
    text = f"out of memory in {shortage.during}"
    if shortage.tried is not None:
        text += f": a tensor of {shortage.tried / 1e9:,.2f} GB did not fit"
    if expected := known_peak(config):
        text += f"; {expected.total / 1e9:,.2f} GB were predicted in all"
    return text + (f", the limit is {limit.size / 1e9:.2f} GB" if limit else "")


def tried_to_allocate(failure: Exception) -> int | None:
    """Bytes of the allocation that failed, by torch's message; None where it does not say."""
    found = re.search(r"tried to allocate ([\d.]+) (bytes|[KMG]iB)", str(failure), re.IGNORECASE)
    return parse_size(f"{found[1]} {found[2].replace('bytes', 'B')}") if found else None


def available(device: torch.device) -> int:
    """Bytes that this process can use of ``device``: on a GPU what other processes leave, if NVML tells theirs."""
    if device.type != "cuda":
        return host.total_memory()
    state = read_gpu(device.index or 0)
    if state and state.process_memory:
        return state.memory_total - (state.memory_used - state.process_memory)
    return torch.cuda.get_device_properties(device).total_memory


def held(model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> dict[str, int]:
    """Bytes of this worker's weights, gradients and optimizer state now, without what cannot be counted."""
    parameters = list(model.parameters()) if model else []
    sizes = {"weights": _bytes(parameters), "gradients": _bytes(p.grad for p in parameters if p.grad is not None)}
    state = list(_tensors(optimizer.state_dict())) if optimizer else []
    if all(type(parallel.local(tensor)) is Tensor for tensor in state):  # torchao's 8-bit ones hide what they take
        sizes["optimizer"] = _bytes(state)
    return sizes


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(parallel.local(tensor).nbytes for tensor in tensors)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)
