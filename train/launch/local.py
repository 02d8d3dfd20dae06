"""A run in the driver's own process: Ray Train's local mode, which starts no Ray.

The main thread trains, as in a plain script, so that debuggers, profilers and exceptions work as there. Another thread
handles the messages of the worker.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from infra.background import repeated
from infra.cli.interrupts import interrupts
from infra.cli.progress import status
from infra.device.host import cpu_count
from train.callbacks import Callback
from train.launch.job import RunJob, WorkerResult
from train.launch.link import POLL_SECONDS, STOP_MESSAGE, Channel
from train.launch.listener import Listener


def train(job: RunJob, listener: Listener, callbacks: Sequence[Callback] = ()) -> WorkerResult:
    """Train ``job`` in this process, and call the ``callbacks`` of a Python program.

    Raises ``KeyboardInterrupt`` when a stop takes too long, the failure of ``listener``, for which the run was stopped
    and saved, and ``UserError`` for a setting that an earlier run in this process has ruled out.
    """
    import ray.train
    import ray.train.torch
    import torch

    from train.launch.worker import train_function
    from train.loop.process import borrowed_process

    logging.getLogger("ray.train").setLevel(logging.WARNING)  # It logs that it runs in local mode.
    torch.set_num_threads(min(torch.get_num_threads(), cpu_count()))  # torch does not know of CPU quotas.
    link = Channel(listener.recorded)
    with (
        borrowed_process(job.config.execution) as has_own_peak,
        status("loading the data") as live_status,
        interrupts.stop_requests(STOP_MESSAGE),
    ):

        def listen() -> None:
            listener.poll(link, live_status, stop=interrupts.stop_requested)

        with repeated(listen, POLL_SECONDS, "listener"):
            trainer = ray.train.torch.TorchTrainer(
                train_function,
                train_loop_config={"job": job, "link": link, "callbacks": callbacks},
                scaling_config=ray.train.ScalingConfig(num_workers=0),
            )
            returned: Any = trainer.fit().return_value
        listener.handle(link.take_updates(), live_status)
    if listener.failure:
        raise listener.failure
    return returned if has_own_peak else _of_process(returned)


def _of_process(returned: WorkerResult) -> WorkerResult:
    """Return ``returned`` with the source of its peak of memory, which may be that of an earlier run in this
    process."""
    result = returned.result
    if result is None or result.memory.process_source != "rss":
        return returned
    return replace(returned, result=replace(result, memory=replace(result.memory, process_source="rss-of-process")))
