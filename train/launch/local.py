"""A run in this process: Ray Train's local mode, which starts no Ray.

The main thread trains, as in a plain script, so that debuggers, profilers and exceptions work as there; another one
listens to what the loop says.
"""

import logging
import threading
from dataclasses import replace
from typing import Any

from infra.cli.interrupts import interrupts
from infra.cli.progress import status
from infra.device.host import cpu_count
from train.launch.channel import LISTEN_SECONDS, STOP_MESSAGE, Channel
from train.launch.job import WorkerJob, WorkerResult
from train.launch.listener import Listener


def run_training(assignment: WorkerJob, listener: Listener, reported: int, telemetry_second: int) -> WorkerResult:
    """Do what ``assignment`` says; cycles are known until ``reported``, telemetry to ``telemetry_second``.

    Raises ``KeyboardInterrupt`` when a stop takes too long, the failure of ``listener``, for which the run was stopped
    and saved, and ``UserError`` for a setting that an earlier run in this process has ruled out.
    """
    import ray.train
    import ray.train.torch
    import torch

    from train.launch.worker import train_function
    from train.loop.process import borrowed_process

    logging.getLogger("ray.train").setLevel(logging.WARNING)  # it says that it runs here
    torch.set_num_threads(min(torch.get_num_threads(), cpu_count()))  # it knows of affinity, and not of quotas
    channel, ended = Channel(reported, telemetry_second), threading.Event()
    with (
        borrowed_process(assignment.config.execution) as own_peak,
        status("loading the data") as shown,
        interrupts.stop_requests(STOP_MESSAGE),
    ):

        def listen() -> None:
            while not ended.wait(LISTEN_SECONDS):
                listener.take(channel.take_updates(), shown)
                if interrupts.stop_requested or listener.failure:
                    channel.stop()

        thread = threading.Thread(target=listen, name="listener", daemon=True)
        thread.start()
        try:
            trainer = ray.train.torch.TorchTrainer(
                train_function,
                train_loop_config={"assignment": assignment, "channel": channel},
                scaling_config=ray.train.ScalingConfig(num_workers=0),
            )
            returned: Any = trainer.fit().return_value
        finally:
            ended.set()
            thread.join()
        listener.take(channel.take_updates(), shown)
    if listener.failure:
        raise listener.failure
    return returned if own_peak else _of_process(returned)


def _of_process(returned: WorkerResult) -> WorkerResult:
    """``returned`` with the source of its peak of memory, which may be that of an earlier run in this process."""
    result = returned.result
    if result is None or result.memory.process_source != "rss":
        return returned
    return replace(returned, result=replace(result, memory=replace(result.memory, process_source="rss-of-process")))
