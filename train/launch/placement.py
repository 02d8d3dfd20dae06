"""The placement of a run's workers: the resources that they request from Ray, and the device that they get."""

from typing import cast

import ray
import ray.train
from ray.exceptions import GetTimeoutError

from infra.device.hardware import DeviceInfo, cpu_info, device_info
from infra.errors import UserError
from infra.ray.machines import (
    accelerator_resource,
    eligible_nodes,
    is_only_machine,
    max_cores_per_worker,
    run_on_nodes,
    wait_for_accelerator,
)
from train.config import DatasetConfig, Execution, ExecutionConfig
from train.data.sources import source_of

READER_CORES = 2
"""CPU cores per worker that are left to Ray Data when training on a book stream."""

RESPONSE_TIMEOUT_SECONDS = 60.0
"""Time for a machine of the cluster to describe its device, for which a process must start there."""


def worker_device_info(execution: ExecutionConfig, workers: int) -> DeviceInfo:
    """The device on which the connected Ray would train: a GPU if there is one per worker, else a CPU.

    Waits for a machine with the requested accelerator. Raises ``UserError`` when its GPU is not free in time.
    """
    if execution.accelerator:
        wait_for_accelerator(execution.accelerator)
    eligible = eligible_nodes(accelerator=execution.accelerator)
    use_gpu = execution.device != "cpu" and sum(int(node.get("GPU", 0)) for node in eligible.values()) >= workers
    if is_only_machine():
        return device_info() if use_gpu else cpu_info()
    if not use_gpu:
        largest = sorted(eligible, key=lambda node: eligible[node].get("CPU", 0))[-1:]
        responses = run_on_nodes(largest, cpu_info, seconds=RESPONSE_TIMEOUT_SECONDS).values()
        return next((info for info in responses if isinstance(info, DeviceInfo)), cpu_info())
    task = ray.remote(num_cpus=0, num_gpus=1)(device_info)
    if execution.accelerator:
        task = task.options(accelerator_type=execution.accelerator)
    try:
        return ray.get(task.remote(), timeout=RESPONSE_TIMEOUT_SECONDS)
    except GetTimeoutError:
        raise UserError(
            f"No GPU of the cluster was free within {RESPONSE_TIMEOUT_SECONDS:.0f} s. Stop other work there, or use "
            "--device cpu."
        ) from None


def make_scaling_config(dataset: DatasetConfig, execution: Execution, workers: int) -> ray.train.ScalingConfig:
    """The workers to request from Ray for a resolved config.

    Raises ``UserError`` if the cluster lacks them; Ray would wait.
    """
    nodes = eligible_nodes(accelerator=execution.accelerator)
    gpus = sum(int(node.get("GPU", 0)) for node in nodes.values())
    use_gpu = execution.device == "cuda"
    if use_gpu and gpus < workers:
        raise UserError(f"--workers {workers} with --device cuda needs {workers} GPUs; Ray has {gpus}.")
    cores_per_worker = max_cores_per_worker(nodes.values(), workers, gpu=use_gpu)
    if not cores_per_worker:
        cores = sum(int(node.get("CPU", 0)) for node in nodes.values())
        raise UserError(f"--workers {workers} needs a CPU core per worker; Ray has {cores}. Use fewer workers.")
    threads = cores_per_worker
    if source_of(dataset).reads_on_ray:
        cores = sum(int(node.get("CPU", 0)) for node in eligible_nodes().values())
        if cores - workers * cores_per_worker < READER_CORES * workers:
            threads = max(1, cores_per_worker - READER_CORES)
        if cores - workers * threads < workers:
            raise UserError(
                f"{dataset.flag} needs a second CPU core per worker to read books; Ray has {cores} for --workers "
                f"{workers}. Tokenize with 'python -m pipeline.tokenize' and use --data."
            )
    return ray.train.ScalingConfig(
        num_workers=workers,
        use_gpu=use_gpu,
        # Ray sets a worker's number of OpenMP threads to its cores.
        resources_per_worker={"CPU": threads} | ({"GPU": 1} if use_gpu else {}),
        accelerator_type=execution.accelerator,
    )


def resources_per_worker(scaling: ray.train.ScalingConfig) -> dict[str, float]:
    """The resources that Ray reserves for each worker of :func:`make_scaling_config`."""
    return cast(dict[str, float], scaling.resources_per_worker) | accelerator_resource(scaling.accelerator_type)
