"""How fast workers can average gradients: all-reduce between Ray Train workers, by size.

In: a number of workers. Out: bus bandwidth, which does not depend on their number (NCCL tests' convention:
each byte crosses the bus 2 (n - 1) / n times), and the verdict for data-parallel GPT-2 124M.
"""

import tempfile
import time
from dataclasses import dataclass
from typing import Any

from infra.cluster import connected, placing
from infra.errors import UserError

SIZES = (2**18, 2**22, 2**26)
"""Bytes reduced at once; DDP's buckets are 25 MiB."""
PARAMETERS, FLOPS_PER_TOKEN, TOKENS = 124_475_904, 854.7e6, 32 * 1024
"""GPT-2 124M: parameters (4 bytes of gradient each), FLOPs per token, and tokens in a micro-batch of 32."""


@dataclass(frozen=True)
class Reduced:
    """Bus bandwidth in bytes/s by the number of bytes reduced."""

    workers: int
    backend: str
    bus_bytes_per_second: dict[str, float]


def measure(workers: int, address: str | None = None) -> Reduced:
    """All-reduce between ``workers`` fresh processes. Raises ``UserError`` when the cluster has too few cores."""
    with connected(address, prestart=False):
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
                scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=use_gpu, resources_per_worker=each),
                run_config=ray.train.RunConfig(name="allreduce", storage_path=folder),
            )
            with placing("the all-reduce", [each] * workers, lambda: False):
                found = trainer.fit().return_value
    assert found is not None
    return Reduced(workers, found["backend"], found["rates"])


def reduce_all() -> dict[str, Any]:
    """Runs in each worker: measures the fastest of several reductions of each size."""
    import torch
    import torch.distributed as dist

    cuda = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
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
    return {"backend": dist.get_backend(), "rates": rates}


def verdict(reduced: Reduced, flops_per_second: float) -> str:
    """Whether averaging GPT-2's gradients takes longer than the backward pass that could hide it."""
    rate = max(reduced.bus_bytes_per_second.values())
    reducing = 2 * (reduced.workers - 1) / reduced.workers * 4 * PARAMETERS / rate
    backward = 2 / 3 * FLOPS_PER_TOKEN * TOKENS / flops_per_second
    text = (
        f"Averaging GPT-2 124M's gradients takes {reducing:.3g} s, and the backward pass of {TOKENS:,} tokens at this "
        f"machine's matmul rate {backward:.3g} s: data-parallel training would "
    )
    if reducing < backward:
        return text + "not be network-bound."
    return text + f"be network-bound; accumulate {int(reducing / backward) + 1} or more micro-batches per step."
