"""A run on Ray's workers, by Ray Train: several, those of a cluster, or one that trains on a stream of books."""

import threading
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
import ray.train.torch
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from infra.cli.interrupts import interrupts
from infra.cli.progress import status
from infra.device.hardware import DeviceInfo, combine_gpus, cpu_info, device_info, worker_gpus_info
from infra.errors import UserError
from infra.ray.cluster import RAY_THREAD_NAME, ray_session, temporary_ray_dir
from infra.ray.machines import (
    accelerator_resource,
    eligible_nodes,
    is_only_machine,
    max_cores_per_worker,
    run_on_nodes,
    wait_for_accelerator,
    wait_for_resources,
)
from train.config import DatasetConfig, Execution, ExecutionConfig
from train.data.sources import source_of
from train.launch.job import RunJob, WorkerResult
from train.launch.link import POLL_SECONDS, STOP_MESSAGE, Link, open_ray_link
from train.launch.listener import Listener
from train.launch.worker import train_function

READER_CORES = 2
"""CPU cores per worker that are left to Ray Data when training on a book stream."""

RESPONSE_TIMEOUT_SECONDS = 60.0
"""Time for a machine of the cluster to describe its device, for which a process must start there."""


class ControllerDied(UserError):
    """Ray Train's controller process has crashed; its workers' resources stay in use until this command ends."""


def train(job: RunJob, listener: Listener) -> WorkerResult:
    """Train ``job`` on Ray's workers; returns what the first one returns.

    Raises ``UserError``, ``ControllerDied``, the failure of ``listener``, for which the run was stopped and saved, and
    ``KeyboardInterrupt`` when a stop takes too long, or Ray has not placed the workers yet.
    """
    run_folder, workers = listener.run.run_folder, job.config.batch.workers
    with (
        temporary_ray_dir(run_folder.path) as ray_folder,
        ray_session(listener.run.address),
        open_ray_link(listener.recorded) as link,
    ):
        scaling = make_scaling_config(job.config.dataset, job.config.execution, workers)
        ray_folder.mkdir()
        marker = ray_folder / f"driver-{uuid.uuid4().hex}"
        marker.touch()
        job = replace(job, driver_marker=marker)
        fit = BackgroundFit(make_trainer(job, link, scaling, ray_folder, run_folder.path))
        with status("waiting for Ray to start the worker") as live_status:
            wait_for_resources("the training", [resources_per_worker(scaling)] * workers)
            with interrupts.stop_requests(STOP_MESSAGE):
                fit.start()
                while fit.is_alive():
                    fit.join(POLL_SECONDS)
                    listener.poll(link, live_status, stop=interrupts.stop_requested)
                    if interrupts.stop_requested and listener.workers.is_lost:
                        raise KeyboardInterrupt
            live_status.update("stopping Ray")
            listener.handle(link.take_updates(), live_status)
    if listener.failure:
        raise listener.failure
    if isinstance(fit.failure, RayActorError):
        raise ControllerDied(
            "Ray Train's controller crashed; the machine may be out of memory. The run's checkpoints in "
            f"{run_folder.location} are kept. Resume it with --resume."
        )
    if fit.failure:
        raise fit.failure
    return fit.returned


def make_trainer(
    job: RunJob, link: Link, scaling: ray.train.ScalingConfig, ray_folder: Path, storage_path: Path
) -> DataParallelTrainer:
    """Create Ray's trainer of ``job``, whose files are in ``ray_folder`` of ``storage_path``."""
    arguments: dict[str, Any] = {
        "train_loop_config": {"job": job, "link": link},
        "scaling_config": scaling,
        "run_config": ray.train.RunConfig(
            name=ray_folder.name,
            storage_path=str(storage_path),
            failure_config=ray.train.FailureConfig(max_failures=-1),  # train_function counts failures itself.
        ),
    }
    if job.config.batch.workers == 1:
        # It needs no process group; a backend for torch would make Ray's controller import torch, for two seconds.
        return DataParallelTrainer(train_function, **arguments)
    return ray.train.torch.TorchTrainer(train_function, **arguments)


class BackgroundFit(threading.Thread):
    """A thread in which a trainer runs, because the main thread handles messages and signals."""

    def __init__(self, trainer: DataParallelTrainer) -> None:
        super().__init__(name=RAY_THREAD_NAME, daemon=True)
        self._trainer = trainer
        self.returned: Any = None
        """Return value of the first worker; None until the trainer has ended."""
        self.failure: BaseException | None = None
        """Exception that the trainer raised; None if it raised none."""

    def run(self) -> None:
        try:
            self.returned = self._trainer.fit().return_value
        except BaseException as failure:  # noqa: BLE001 raised in the main thread
            self.failure = failure


def worker_device_info(execution: ExecutionConfig, workers: int) -> DeviceInfo:
    """Return the device on which the connected Ray would train: a GPU if there is one per worker, else a CPU.

    Of several workers' GPUs it has the properties that all have. Waits for a machine with the requested accelerator.
    Raises ``UserError`` when its GPU is not free in time.
    """
    if execution.accelerator:
        wait_for_accelerator(execution.accelerator)
    eligible = eligible_nodes(accelerator=execution.accelerator)
    use_gpu = execution.device != "cpu" and sum(int(node.get("GPU", 0)) for node in eligible.values()) >= workers
    if is_only_machine():
        return worker_gpus_info(workers) if use_gpu else cpu_info()
    if not use_gpu:
        largest = sorted(eligible, key=lambda node: eligible[node].get("CPU", 0))[-1:]
        responses = run_on_nodes(largest, cpu_info, seconds=RESPONSE_TIMEOUT_SECONDS).values()
        return next((info for info in responses if isinstance(info, DeviceInfo)), cpu_info())
    # The workers of a placement group have different GPUs, also if one has responded before another starts.
    group = placement_group([{"GPU": 1} | accelerator_resource(execution.accelerator)] * workers)
    task = ray.remote(num_cpus=0, num_gpus=1)(device_info)
    try:
        responses = [
            task.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
            for index in range(workers)
        ]
        return combine_gpus(ray.get(responses, timeout=RESPONSE_TIMEOUT_SECONDS))
    except GetTimeoutError:
        gpus = "No GPU of the cluster was" if workers == 1 else f"Fewer than {workers} GPUs of the cluster were"
        raise UserError(
            f"{gpus} free within {RESPONSE_TIMEOUT_SECONDS:.0f} s. Stop other work there, or use --device cpu."
        ) from None
    finally:
        remove_placement_group(group)


def make_scaling_config(dataset: DatasetConfig, execution: Execution, workers: int) -> ray.train.ScalingConfig:
    """Return the workers to request from Ray for a resolved config.

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
    """Return the resources that Ray reserves for each worker of :func:`make_scaling_config`."""
    return cast(dict[str, float], scaling.resources_per_worker) | accelerator_resource(scaling.accelerator_type)
