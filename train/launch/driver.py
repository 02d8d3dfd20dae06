"""The driver's side of a run on Ray Train: start the worker, hear its reports, record them in MLflow.

In: a config and the run's tracker. Out: a RunResult. A worker that dies is restarted and continues from the run's
newest checkpoint. Cycles that it repeats are not printed or sent to MLflow a second time, and those that MLflow lacks
are sent. The worker does not use MLflow: importing it and opening its store would take three seconds before the first
step, and its thread would compete with the loop.
"""

import os
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.exceptions import RayActorError

from infra.cluster import WAITER, await_room, connected, placing, ray_files
from infra.command import INTERRUPTED
from infra.console import console, errors
from infra.errors import UserError
from infra.place import Place
from infra.progress import doing
from infra.schema import from_json, to_json
from infra.storage import write_json
from infra.tracking.store import last_steps
from infra.tracking.tracker import Tracker
from train import diagnosis, report
from train.checkpoint.progress import known_checksums, read_progress
from train.checkpoint.run_folder import RunFolder
from train.config import TrainConfig
from train.confirmed import slower
from train.data.source import absolute
from train.estimate.flops import with_matmul_efficiency
from train.launch.channel import Inbox, News, opened
from train.launch.controller import SingleWorker
from train.launch.group import WorkerGroup
from train.launch.pace import Pace
from train.launch.placement import needs, scaling
from train.launch.run import Run
from train.launch.worker import train_function
from train.loop.execution import worker_environment
from train.result import Diagnosis, RunResult

POLL_SECONDS = 0.2

STOP_SECONDS = 18.0
"""How long a step and its checkpoint may take after Ctrl-C, out of the 30 s within which the command ends."""

SEND_SECONDS = 5.0
"""Between two copies of a run's cycles to object storage."""


class ControllerDied(UserError):
    """Ray Train's controller process has died; its workers' resources stay taken until our command ends."""


class WorkerFailure(Exception):
    """The loop failed in its worker; the message is the worker's traceback."""


def measure(
    run: Run, config: TrainConfig, tracker: Tracker, say: Callable[[str], None], out: Place | None = None
) -> tuple[RunResult, dict[str, float] | None]:
    """Train ``run`` as ``config``, print each cycle's line with ``say``, and record the result.

    ``out`` is where runs are, and what the doctor has measured; around the run's place if left out.
    Returns the result, and NVML's readings of the worker's GPU during the run. Raises as :func:`train` does.
    """
    result, gpu = train(run, config, tracker, lambda cycle: say(cycle["line"]))
    result = with_matmul_efficiency(result, config, out or run.home.place.parent)
    result = replace(result, diagnosis=diagnosed(run, config, result))
    write_json(run.home.result, to_json(result))
    run.home.send(run.home.cycles, run.home.stream, run.home.result)
    report.record_end(tracker, config, result, gpu, run.home, run.memory_limit)
    tracker.status = {"finished": "FINISHED", "interrupted": "KILLED"}.get(result.outcome, "FAILED")
    return result, gpu


def diagnosed(run: Run, config: TrainConfig, result: RunResult) -> Diagnosis | None:
    """What was wrong with the ``result`` of a run: that it did not fit in memory, or was slower than its search."""
    found = diagnosis.of_memory(config, result, run.home.place, run.memory_limit)
    return found or (slower(result, run.confirmed, config) if run.confirmed else None)


def train(
    run: Run, config: TrainConfig, tracker: Tracker, on_cycle: Callable[[dict[str, Any]], None] = lambda cycle: None
) -> tuple[RunResult, dict[str, float] | None]:
    """Train ``run`` on Ray Train as the resolved ``config``; ``on_cycle`` is called with the report of each cycle.

    Returns the result, and NVML's readings of the worker's GPU. Without a checkpoint to continue from, files of an
    earlier run in the folder are removed. After Ctrl-C or SIGTERM the step is finished and saved and the outcome is
    ``interrupted``; if that takes more than ``STOP_SECONDS``, or Ray has not placed the workers yet,
    ``KeyboardInterrupt`` is raised. A second signal exits at once. Raises ``UserError`` when the cluster lacks what the
    config asks for or the workers do not find the checkpoint or the data, ``ControllerDied``, and ``WorkerFailure`` for
    our bugs.
    """
    home, folder = run.home, run.home.path
    folder.mkdir(parents=True, exist_ok=True)
    reported, sent, step, second = 0, dict[str, int](), 0, 0
    if run.resume:
        progress = read_progress(run.resume)
        reported, step = progress.reported, progress.step
        tracker.flush()
        sent = last_steps(tracker.key)
        second = max((last for name, last in sent.items() if name.startswith("system/")), default=0)
    elif not home.kept_at:
        shutil.rmtree(home.checkpoints, ignore_errors=True)
        home.cycles.unlink(missing_ok=True)

    def record(cycle: dict[str, Any]) -> None:
        for step, values in report.cycle_metrics(cycle):
            tracker.metrics({name: value for name, value in values.items() if step > sent.get(name, 0)}, step)

    for cycle in home.cycles_until(reported):
        record(cycle)
    with ray_files(folder) as files, connected(run.address, prestart=False), opened(reported, second) as channel:
        wanted = scaling(config)
        files.mkdir()
        marker = files / f"driver-{uuid.uuid4().hex}"
        marker.touch()
        trainer = ray.train.torch.TorchTrainer(
            train_function,
            train_loop_config={
                "config": absolute(config).to_json(),
                "asked": absolute(run.asked).to_json(),
                "place": home.place.address,
                "marker": None if home.kept_at else str(marker),
                "channel": channel,
                "step": step,
                "fingerprint": run.manifest.fingerprint,
                "checksums": known_checksums(),
                "memory_limit": run.memory_limit,
                "stream": run.stream,
            },
            torch_config=SingleWorker() if config.workers == 1 else None,  # type: ignore[arg-type]
            scaling_config=wanted,
            run_config=ray.train.RunConfig(
                name=files.name,
                storage_path=str(folder),
                worker_runtime_env={"env_vars": worker_environment(config)},
                failure_config=ray.train.FailureConfig(max_failures=-1),  # train_function counts failures itself
            ),
        )  # fmt: skip
        done: list[Any] = []

        def fit() -> None:
            try:
                done.append(trainer.fit())
            except BaseException as failure:  # noqa: BLE001 carried to the main thread, which raises it
                done.append(failure)

        thread = threading.Thread(target=fit, name=WAITER, daemon=True)
        bundles = [needs(wanted)] * config.workers
        group, pace = WorkerGroup(tracker), Pace(config, run.manifest)
        inbox = Inbox(channel)
        with (
            doing("waiting for Ray to start the worker") as shown,
            stop_on_signal() as stopped,
            placing("the training", bundles, group.is_heard) as waits,
            sent_meanwhile(home) as changed,
        ):

            def take(news: News) -> None:
                for kind, content in news.messages:
                    if kind == "cycle":
                        record(content)
                        pace.cycle(content)
                        if home.kept_at:
                            home.log(content)
                            changed.set()
                        on_cycle(content)
                    elif kind == "system":
                        at, metrics = content
                        tracker.metrics(metrics, at)
                    elif kind == "begun":
                        group.begun(content)
                    else:
                        console.print(content, markup=False)
                group.look(news.silence)
                if group.is_silent:
                    shown.now("waiting for a worker that answers")
                elif news.doing:
                    shown.now(*pace.shown(*news.doing))

            if not await_room(bundles, lambda: stopped):
                raise KeyboardInterrupt
            told = False
            thread.start()
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                if news := inbox.poll():
                    take(news)
                if stopped and not told:
                    told = True
                    channel.stop.remote()
                if stopped and (waits.is_set() or group.is_lost):
                    raise KeyboardInterrupt
                if stopped and time.monotonic() - stopped[0] > STOP_SECONDS:
                    errors.print(f"No step was finished and saved within {STOP_SECONDS:.0f} s; exiting without it.")
                    raise KeyboardInterrupt
            shown.now("ending")
            for news in inbox.rest():
                take(news)
    if isinstance(done[0], RayActorError):
        raise ControllerDied(
            f"Ray Train's controller died (is the machine out of memory?). Finished work in {home.place.parent} is "
            "kept: continue with --resume."
        )
    if isinstance(done[0], BaseException):
        raise done[0]
    returned = done[0].return_value
    if "refused" in returned:
        raise UserError(returned["refused"])
    if "failed" in returned:
        raise WorkerFailure(returned["failed"])
    if returned["stream"]:
        write_json(home.stream, returned["stream"])
        tracker.file(home.stream)
    return from_json(RunResult, returned["result"], "the worker's result"), returned["gpu"]


@contextmanager
def sent_meanwhile(home: RunFolder) -> Iterator[threading.Event]:
    """While the block runs, send the cycles of a run in object storage there whenever the event has been set.

    Storage that is away is tried again later; what matters is in each checkpoint, and sent again at the end.
    """
    changed, ended = threading.Event(), threading.Event()

    def send() -> None:
        while not ended.wait(SEND_SECONDS):
            if changed.is_set():
                changed.clear()
                try:
                    home.send(home.cycles)
                except UserError:
                    changed.set()

    if not home.kept_at:
        yield changed
        return
    thread = threading.Thread(target=send, name="sending", daemon=True)
    thread.start()
    try:
        yield changed
    finally:
        ended.set()


@contextmanager
def stop_on_signal() -> Iterator[list[float]]:
    """Note the first SIGINT or SIGTERM during the block; a second one, then or later, exits.

    The list that is yielded gets the time of the first one, by ``time.monotonic``.
    """
    asked: list[float] = []

    def handle(signum: int, frame: object) -> None:
        if asked:
            os._exit(INTERRUPTED)
        asked.append(time.monotonic())
        errors.print("\nStopping after this step and saving; press again to exit at once.")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        if not asked:
            for number, handler in previous.items():
                signal.signal(number, handler)
