"""A run on Ray's workers, by Ray Train: several, those of a cluster, or one that trains on a stream of books."""

import threading
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
from ray.exceptions import RayActorError
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from infra.cli.interrupts import interrupts
from infra.cli.progress import status
from infra.errors import UserError
from infra.ray.cluster import RAY_THREAD_NAME, ray_session, temporary_ray_dir
from infra.ray.machines import wait_for_resources
from train.launch.job import RunJob, WorkerResult
from train.launch.link import POLL_SECONDS, STOP_MESSAGE, Link, open_ray_link
from train.launch.listener import Listener
from train.launch.placement import make_scaling_config, resources_per_worker
from train.launch.worker import train_function


class ControllerDied(UserError):
    """Ray Train's controller process has died; its workers' resources stay taken until our command ends."""


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
            "Ray Train's controller died; the machine may be out of memory. Finished work in "
            f"{run_folder.location.parent} is kept. Use --resume to continue."
        )
    if fit.failure:
        raise fit.failure
    return fit.returned


def make_trainer(
    job: RunJob, link: Link, scaling: ray.train.ScalingConfig, ray_folder: Path, storage_path: Path
) -> DataParallelTrainer:
    """Ray's trainer of ``job``, whose files are in ``ray_folder`` of ``storage_path``."""
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
        """What the first worker returned."""
        self.failure: BaseException | None = None
        """What the trainer raised."""

    def run(self) -> None:
        try:
            self.returned = self._trainer.fit().return_value
        except BaseException as failure:  # noqa: BLE001 raised in the main thread
            self.failure = failure
