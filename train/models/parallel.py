"""Data-parallel workers: their ranks, the values that they exchange, and the distribution of the model.

The interface is the same for one worker and for several in a process group. Rank 0 decides, for example when to stop,
except that any worker can report that it exceeds its memory limit. Decisions are exchanged over the CPU, so that no GPU
waits for them.
"""

import contextlib
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from infra.errors import UserError
from train.config import Device
from train.models.blocks import repeated_blocks

if TYPE_CHECKING:  # The imports take a second, and a single worker does not need them.
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor


class Workers:
    """The data-parallel workers of a run, from the perspective of one of them."""

    def __init__(self, workers: int) -> None:
        is_distributed = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if is_distributed else 0
        self.size = dist.get_world_size() if is_distributed else 1
        if self.size != workers:
            raise UserError(
                f"--workers {workers} does not match the process group of {self.size}. Start the run with "
                f"'python -m train.run --workers {workers}'."
            )
        self._control: Any = dist.new_group(backend="gloo") if self.size > 1 else None

    @property
    def is_first(self) -> bool:
        """Whether this worker reports and saves for all workers."""
        return self.rank == 0

    def all_max(self, *values: float) -> list[float]:
        """Return the maximum of each of ``values`` over all workers."""
        if self._control is None:
            return list(values)
        maximums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(maximums, dist.ReduceOp.MAX, group=self._control)
        return maximums.tolist()

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` over all workers, without changing ``values``."""
        if self.size == 1:
            return values
        total = values.clone()
        dist.all_reduce(total)
        return total / self.size


def all_gather(value: Any) -> list[Any]:
    """Return the ``value`` of every worker, in the order of ranks. All workers must call it, before they train."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=dist.new_group(backend="gloo"))
    return values


def apply_fsdp(model: nn.Module, device: Device, workers: int) -> None:
    """Distribute weights, gradients and optimizer state over the workers, block by block (FSDP2)."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.device_mesh.init_device_mesh(device, (workers,))
    for block in repeated_blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def apply_ddp(forward: Any, device: torch.device, has_unused_parameters: bool) -> DistributedDataParallel:
    """Wrap the model in DDP: each worker has a copy, and gradients are averaged during the backward pass.

    With ``has_unused_parameters`` each step first finds the parameters that do not contribute to the loss.
    """
    return DistributedDataParallel(
        forward,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=has_unused_parameters,
    )


def gradient_sync(forward: Any, model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a micro-batch, in which gradients are only exchanged if it is the ``last`` of its step."""
    if _is_sharded_model(model):
        model.set_requires_gradient_sync(last)
    elif isinstance(forward, DistributedDataParallel) and not last:
        return forward.no_sync()
    return contextlib.nullcontext()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that may be sharded; all workers must call it together."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this worker's shard of a tensor that may be sharded."""
    return tensor.to_local() if _is_sharded(tensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this worker's shard of the full ``tensor``, distributed as ``like``."""
    if not _is_sharded(like) or tensor.shape != like.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


# A sharded object can only exist where the module of its class has been imported.
def _is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _is_sharded_model(model: nn.Module) -> "TypeGuard[FSDPModule]":
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(model, module.FSDPModule)
