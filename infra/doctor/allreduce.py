"""The speed at which workers average gradients: all-reduce between Ray Train workers, by size.

By the convention of the NCCL tests, each byte crosses the bus 2 (n - 1) / n times, so that the bus bandwidth does not
depend on the number of workers n. ``train.plan`` predicts the effect of the bandwidth on the speed of a model.
"""

import socket
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from infra.errors import UserError
from infra.ray.cluster import ray_session
from infra.ray.machines import wait_for_resources

BUFFER_BYTES = (2**18, 2**22, 2**26)
"""Sizes of the reduced buffers in bytes; DDP's buckets are 25 MiB."""


@dataclass(frozen=True)
class AllReduceResult:
    """Measured all-reduce between several workers, and the matmul rate of one of them."""

    workers: int
    backend: str
    bus_bytes_per_second: dict[str, float]
    """Bus bandwidth in bytes/s by the number of reduced bytes."""
    device: str
    """Name of the first worker's GPU in torch, or cpu."""
    matmul: dict[str, float]
    """FLOP/s of the first worker's matrix products by precision, measured while all workers multiply."""
    machines: list[str]
    """Names of the workers' machines, by rank."""


def measure(workers: int, address: str | None = None) -> AllReduceResult:
    """Measure all-reduce between ``workers`` new processes. Raises ``UserError`` if the cluster has too few cores."""
    with ray_session(address):
        import ray
        import ray.train
        import ray.train.torch

        resources = ray.cluster_resources()
        if resources.get("CPU", 0) < workers:
            raise UserError(
                f"--workers {workers} needs a CPU core for each worker; Ray has {resources.get('CPU', 0):g}. Use fewer "
                "workers, or join a larger cluster with --address."
            )
        use_gpu = resources.get("GPU", 0) >= workers
        resources_per_worker = {"GPU": 1.0} if use_gpu else {"CPU": 1.0}
        with tempfile.TemporaryDirectory() as folder:
            trainer = ray.train.torch.TorchTrainer(
                benchmark_all_reduce,
                scaling_config=ray.train.ScalingConfig(
                    num_workers=workers,
                    use_gpu=use_gpu,
                    resources_per_worker=resources_per_worker,
                    placement_strategy="SPREAD",
                ),
                run_config=ray.train.RunConfig(name="allreduce", storage_path=folder),
            )
            wait_for_resources("the all-reduce", [resources_per_worker] * workers)
            measurements = trainer.fit().return_value
    assert measurements is not None
    return AllReduceResult(workers, **measurements)


def benchmark_all_reduce() -> dict[str, Any]:
    """Measure this worker's matrix products and, for each size, the fastest of several reductions."""
    import torch
    import torch.distributed as dist

    from infra import ceilings

    uses_cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if uses_cuda else torch.device("cpu")
    machines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(machines, socket.gethostname())
    matmul = ceilings.measure_matmul_rates(device)
    rates = {}
    for size in BUFFER_BYTES:
        values = torch.ones(size // 4, device=device)
        best_seconds = float("inf")
        for _ in range(8):
            dist.barrier()
            started_at = time.perf_counter()
            dist.all_reduce(values)
            if uses_cuda:
                torch.cuda.synchronize()
            best_seconds = min(best_seconds, time.perf_counter() - started_at)
        workers = dist.get_world_size()
        rates[str(size)] = 2 * (workers - 1) / workers * size / best_seconds
    return {
        "backend": dist.get_backend(),
        "bus_bytes_per_second": rates,
        "device": torch.cuda.get_device_name(device) if uses_cuda else "cpu",
        "matmul": matmul,
        "machines": machines,
    }
