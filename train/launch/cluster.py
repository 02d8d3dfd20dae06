"""A run on Ray's workers, by Ray Train: several, those of a cluster, or one on a stream of books."""

import threading
import uuid
from dataclasses import replace
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.exceptions import RayActorError

from infra.cli.progress import doing
from infra.errors import UserError
from infra.ray.cluster import WAITER, connected, ray_files
from infra.ray.machines import await_room
from train.launch.channel import LISTEN_SECONDS, opened
from train.launch.controller import SingleWorker
from train.launch.job import Assignment, Returned
from train.launch.listener import Listener
from train.launch.placement import needs, scaling
from train.launch.signals import stop_on_signal
from train.launch.worker import train_function


class ControllerDied(UserError):
    """Ray Train's controller process has died; its workers' resources stay taken until our command ends."""


def start(assignment: Assignment, listener: Listener, reported: int, second: int) -> Returned:
    """What the first worker returns for ``assignment``; the rest as :func:`train.launch.local.start`.

    Raises ``UserError``, ``ControllerDied``, and ``KeyboardInterrupt`` when a stop takes too long, or Ray has not
    placed the workers yet.
    """
    run, config = listener.run, listener.config
    home = run.home
    with (
        ray_files(home.path) as files,
        connected(run.address),
        opened(reported, second) as channel,
    ):
        wanted = scaling(config)
        files.mkdir()
        if not home.remote:
            marker = files / f"driver-{uuid.uuid4().hex}"
            marker.touch()
            assignment = replace(assignment, marker=marker)
        trainer = ray.train.torch.TorchTrainer(
            train_function,
            train_loop_config={"assignment": assignment, "channel": channel},
            torch_config=SingleWorker() if config.workers == 1 else None,  # type: ignore[arg-type]
            scaling_config=wanted,
            run_config=ray.train.RunConfig(
                name=files.name,
                storage_path=str(home.path),
                failure_config=ray.train.FailureConfig(max_failures=-1),  # train_function counts failures itself
            ),
        )
        done: list[Any] = []

        def fit() -> None:
            try:
                done.append(trainer.fit())
            except BaseException as failure:  # noqa: BLE001 carried to the main thread, which raises it
                done.append(failure)

        thread = threading.Thread(target=fit, name=WAITER, daemon=True)
        group = listener.group
        with doing("waiting for Ray to start the worker") as shown, stop_on_signal() as stop:
            if not await_room("the training", [needs(wanted)] * config.workers, lambda: stop):
                raise KeyboardInterrupt
            asked, news = False, channel.actor.news.remote()
            thread.start()
            while thread.is_alive():
                thread.join(LISTEN_SECONDS)
                if ray.wait([news], timeout=0)[0]:  # else the actor is still starting, which is not waited for
                    listener.take(ray.get(news), shown)
                    news = channel.actor.news.remote()
                if (stop or listener.failure) and not asked:
                    asked = True
                    channel.stop()
                if stop and (group.is_lost or stop.is_late()):
                    raise KeyboardInterrupt
            shown.now("ending")
            listener.take(ray.get(news), shown)
            listener.take(channel.news(), shown)
    if listener.failure:
        raise listener.failure
    if isinstance(done[0], RayActorError):
        raise ControllerDied(
            f"Ray Train's controller died (is the machine out of memory?). Finished work in {home.place.parent} is "
            "kept: continue with --resume."
        )
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0].return_value
