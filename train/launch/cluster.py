"""A run on Ray's workers, by Ray Train: several, those of a cluster, or one on a stream of books."""

import threading
import uuid
from dataclasses import replace
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.exceptions import RayActorError

from infra.cli.interrupts import interrupts
from infra.cli.progress import status
from infra.errors import UserError
from infra.ray.cluster import RAY_THREAD_NAME, ray_session, temporary_ray_dir
from infra.ray.machines import wait_for_resources
from train.launch.channel import LISTEN_SECONDS, STOP_MESSAGE, open_channel
from train.launch.controller import SingleWorker
from train.launch.job import WorkerJob, WorkerResult
from train.launch.listener import Listener
from train.launch.placement import make_scaling_config, resources_per_worker
from train.launch.worker import train_function


class ControllerDied(UserError):
    """Ray Train's controller process has died; its workers' resources stay taken until our command ends."""


def run_training(assignment: WorkerJob, listener: Listener, reported: int, telemetry_second: int) -> WorkerResult:
    """What the first worker returns for ``assignment``; the rest as :func:`train.launch.local.run_training`.

    Raises ``UserError``, ``ControllerDied``, and ``KeyboardInterrupt`` when a stop takes too long, or Ray has not
    placed the workers yet.
    """
    run, config = listener.run, listener.config
    run_folder = run.run_folder
    with (
        temporary_ray_dir(run_folder.path) as files,
        ray_session(run.address),
        open_channel(reported, telemetry_second) as channel,
    ):
        wanted = make_scaling_config(config.dataset, config.execution, config.batch.workers)
        files.mkdir()
        marker = files / f"driver-{uuid.uuid4().hex}"
        marker.touch()
        assignment = replace(assignment, driver_marker=marker)
        trainer = ray.train.torch.TorchTrainer(
            train_function,
            train_loop_config={"assignment": assignment, "channel": channel},
            torch_config=SingleWorker() if config.batch.workers == 1 else None,  # type: ignore[arg-type]
            scaling_config=wanted,
            run_config=ray.train.RunConfig(
                name=files.name,
                storage_path=str(run_folder.path),
                failure_config=ray.train.FailureConfig(max_failures=-1),  # train_function counts failures itself
            ),
        )
        done: list[Any] = []

        def fit() -> None:
            try:
                done.append(trainer.fit())
            except BaseException as failure:  # noqa: BLE001 carried to the main thread, which raises it
                done.append(failure)

        thread = threading.Thread(target=fit, name=RAY_THREAD_NAME, daemon=True)
        group = listener.group
        with status("waiting for Ray to start the worker") as shown:
            wait_for_resources("the training", [resources_per_worker(wanted)] * config.batch.workers)
            with interrupts.stop_requests(STOP_MESSAGE):
                has_requested_stop, updates = False, channel.actor.take_updates.remote()
                thread.start()
                while thread.is_alive():
                    thread.join(LISTEN_SECONDS)
                    if ray.wait([updates], timeout=0)[0]:  # else the actor is still starting, which is not waited for
                        listener.take(ray.get(updates), shown)
                        updates = channel.actor.take_updates.remote()
                    if (interrupts.stop_requested or listener.failure) and not has_requested_stop:
                        has_requested_stop = True
                        channel.stop()
                    if interrupts.stop_requested and group.is_lost:
                        raise KeyboardInterrupt
            shown.update("ending")
            listener.take(ray.get(updates), shown)
            listener.take(channel.take_updates(), shown)
    if listener.failure:
        raise listener.failure
    if isinstance(done[0], RayActorError):
        raise ControllerDied(
            "Ray Train's controller died (is the machine out of memory?). Finished work in "
            f"{run_folder.location.parent} is "
            "kept: continue with --resume."
        )
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0].return_value
