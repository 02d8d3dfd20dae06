"""How fast workers can average gradients: all-reduce between Ray Train workers, by size.

Bus bandwidth does not depend on the number of workers (NCCL tests' convention: each byte crosses the bus
2 (n - 1) / n times). ``train.plan`` tells what it means for a model.
"""

import socket
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from infra.cluster import connected
from infra.errors import UserError
from infra.machines import await_room

SIZES = (2**18, 2**22, 2**26)
"""Bytes reduced at once; DDP's buckets are 25 MiB."""


@dataclass(frozen=True)
class Reduced:
    """What workers reach together."""

    workers: int
    backend: str
    bus_bytes_per_second: dict[str, float]
    """By the number of bytes reduced."""
    device: str
    """Of the first worker, as torch names it, or cpu."""
    matmul: dict[str, float]
    """FLOP/s of its matrix products by precision, while the others multiply, too."""
    machines: list[str]
    """That the workers were on, by rank."""


def measure(workers: int, address: str | None = None) -> Reduced:
    """All-reduce between ``workers`` fresh processes. Raises ``UserError`` when the cluster has too few cores."""
    with connected(address):
        import ray
        import ray.train
        import ray.train.torch

        resources = ray.cluster_resources()
        if resources.get("CPU", 0) < workers:
            raise UserError(f"--workers {workers} needs a core each and Ray has {resources.get('CPU', 0):g}.")
        use_gpu = resources.get("GPU", 0) >= workers
        each = {"GPU": 1.0} if use_gpu else {"CPU": 1.0}
        with tempfile.TemporaryDirectory() as folder:
            trainer = ray.train.torch.TorchTrainer(
                reduce_all,
                scaling_config=ray.train.ScalingConfig(
                    num_workers=workers, use_gpu=use_gpu, resources_per_worker=each, placement_strategy="SPREAD"
                ),
                run_config=ray.train.RunConfig(name="allreduce", storage_path=folder),
            )
            await_room("the all-reduce", [each] * workers)
            found = trainer.fit().return_value
    assert found is not None
    return Reduced(workers, **found)


def reduce_all() -> dict[str, Any]:
    """Runs in each worker: measures its matrix products, and the fastest of several reductions of each size."""
    import torch
    import torch.distributed as dist

    from infra.doctor import ceilings

    cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    machines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(machines, socket.gethostname())
    matmul = ceilings.matmul_rates(device)
    rates = {}
    for size in SIZES:
        values = torch.ones(size // 4, device=device)
        best = float("inf")
        for _ in range(8):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(values)
            if cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        workers = dist.get_world_size()
        rates[str(size)] = 2 * (workers - 1) / workers * size / best
    return {
        "backend": dist.get_backend(),
        "bus_bytes_per_second": rates,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "matmul": matmul,
        "machines": machines,
    }
