"""The driver's side of a run on Ray Train: start the worker, follow what it reports, record it in MLflow.

In: a config and the run's tracker. Out: a RunResult. A worker that dies is started again and goes on from
the newest checkpoint in the run's folder. What it then does again is neither printed nor sent to MLflow
twice, and what was lost on the way there is sent. The worker itself knows nothing of MLflow: importing it
and opening its store took three of the seconds before the first step, and its thread ran beside the loop.
"""

import os
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import ray
import ray.train
import ray.train.torch
from ray.exceptions import GetTimeoutError, RayActorError

from infra.cluster import Node, connected, cores_each, eligible_nodes, placing, ray_files
from infra.command import INTERRUPTED, errors
from infra.errors import UserError
from infra.hardware import DeviceFacts, cpu_facts, device_facts
from infra.schema import from_json
from infra.tracking.store import last_steps
from infra.tracking.tracker import Tracker
from train.checkpoint.progress import known_checksums, read_progress
from train.checkpoint.run_folder import Follower, RunFolder
from train.config import TrainConfig
from train.data.source import absolute
from train.launch.controller import Alone, Presence
from train.launch.worker import train_function
from train.loop.execution import worker_environment
from train.report import cycle_metrics
from train.result import RunResult

POLL_SECONDS = 0.2
ANSWER_SECONDS = 60.0
"""How long a machine of the cluster may take to say what GPU it has: a process starts there."""
READERS = 2
"""Cores that are left to Ray Data by each worker that trains on a stream."""


STOP_SECONDS = 18.0
"""How long a step and its checkpoint may take after Ctrl-C, of the 30 s in which the command ends."""


class ControllerDied(UserError):
    """Ray Train's own process is gone, and what its workers held stays taken until our command ends."""


class WorkerFailure(Exception):
    """The loop failed in its worker; the text is the worker's traceback."""


def run(
    config: TrainConfig,
    folder: Path,
    *,
    tracker: Tracker,
    asked: TrainConfig | None = None,
    resume: Path | None = None,
    memory_limit: int | None = None,
    address: str | None = None,
    on_cycle: Callable[[dict[str, Any]], None] = lambda cycle: None,
) -> RunResult:
    """Train a resolved config through Ray Train in ``folder`` (absolute, shared with the workers).

    It is recorded to ``tracker``; ``asked`` is the config as the user left it open, which checkpoints keep.
    With ``resume``, the newest checkpoint of the folder, the run goes on; without, what an earlier run left
    there is removed. A worker whose process uses more than ``memory_limit`` bytes ends it. Ctrl-C and SIGTERM finish
    the step, save and return the outcome ``interrupted``; where that takes more than ``STOP_SECONDS``, or Ray has no
    room for the workers yet, they raise ``KeyboardInterrupt``. A second one exits at once. Raises ``UserError`` when
    the cluster lacks what the config asks for or the workers do not find what they continue from, ``ControllerDied``,
    and ``WorkerFailure`` for our bugs.
    """
    home = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    home.stop.unlink(missing_ok=True)
    home.refused.unlink(missing_ok=True)  # of a run that was killed before its workers had read it
    reported, sent, step = 0, dict[str, int](), 0
    if resume:
        progress = read_progress(resume)
        reported, step = progress.reported, progress.step
        tracker.flush()
        sent = last_steps(tracker.key)
    else:
        shutil.rmtree(home.checkpoints, ignore_errors=True)
        home.cycles.unlink(missing_ok=True)
    command = uuid.uuid4().hex
    home.keep_starts(command, [])

    def hand_on(cycle: dict[str, Any]) -> None:
        for step, values in cycle_metrics(cycle):
            tracker.metrics({name: value for name, value in values.items() if step > sent.get(name, 0)}, step)
        if cycle["step"] > reported:
            on_cycle(cycle)

    follower = Follower(home.cycles, hand_on)
    with ray_files(folder) as place, connected(address, prestart=False):
        wanted = scaling(config)
        begun = place / "begun"
        trainer = ray.train.torch.TorchTrainer(
            train_function,
            train_loop_config={
                "config": absolute(config).to_json(),
                "asked": absolute(asked or config).to_json(),
                "folder": str(folder),
                "command": command,
                "step": step,
                "begun": str(begun),
                "checksums": known_checksums(),
                "memory_limit": memory_limit,
            },
            torch_config=Alone() if config.workers == 1 else None,  # type: ignore[arg-type]
            scaling_config=wanted,
            run_config=ray.train.RunConfig(
                name=place.name,
                storage_path=str(folder),
                worker_runtime_env={"env_vars": worker_environment(config)},
                failure_config=ray.train.FailureConfig(max_failures=-1),  # train_function counts what matters
                callbacks=[Presence(begun)],
            ),
        )  # fmt: skip
        done: list[Any] = []

        def fit() -> None:
            try:
                done.append(trainer.fit())
            except BaseException as failure:  # noqa: BLE001 carried to the main thread, which raises it
                done.append(failure)

        thread = threading.Thread(target=fit, name="ray-train", daemon=True)
        bundles = [cast(Node, wanted.resources_per_worker)] * config.workers
        with stop_on_signal(home.stop) as stopped, placing("the training", bundles, begun.exists) as waits:
            thread.start()
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                follower.poll()
                if stopped and waits.is_set():
                    raise KeyboardInterrupt
                if stopped and time.monotonic() - stopped[0] > STOP_SECONDS:
                    errors.print(f"No step was finished and saved within {STOP_SECONDS:.0f} s; leaving without it.")
                    raise KeyboardInterrupt
    if home.stream.exists():
        tracker.file(home.stream)
    if isinstance(done[0], RayActorError):
        raise ControllerDied(
            f"Ray Train's controller died (is the machine out of memory?). What is finished in {folder.parent} is "
            "kept: continue with --resume."
        )
    if isinstance(done[0], BaseException):
        raise done[0]
    returned = done[0].return_value
    if "refused" in returned:
        raise UserError(returned["refused"])
    if "failed" in returned:
        raise WorkerFailure(returned["failed"])
    return from_json(RunResult, returned, "the worker's result")


def worker_facts(config: TrainConfig) -> DeviceFacts:
    """The device that the connected Ray would train ``config`` on: its GPUs' where it has enough, else its CPUs'.

    Raises ``UserError`` when the machine with the GPU does not answer.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    eligible = eligible_nodes(accelerator=config.accelerator)
    if config.device == "cpu" or sum(int(node.get("GPU", 0)) for node in eligible) < config.workers:
        return cpu_facts()
    if [node["NodeManagerHostname"] for node in nodes] == [socket.gethostname()]:
        return device_facts()
    there = ray.remote(num_cpus=0, num_gpus=1)(device_facts)
    if config.accelerator:
        there = there.options(accelerator_type=config.accelerator)
    try:
        return ray.get(there.remote(), timeout=ANSWER_SECONDS)
    except GetTimeoutError:
        raise UserError(
            f"no GPU of the cluster was free within {ANSWER_SECONDS:.0f} s: end what runs there, or use --device cpu."
        ) from None


def scaling(config: TrainConfig) -> ray.train.ScalingConfig:
    """The workers to ask Ray for, by a resolved config.

    Raises ``UserError`` when the cluster lacks them, for which Ray would wait.
    """
    nodes = eligible_nodes(accelerator=config.accelerator)
    gpus = sum(int(node.get("GPU", 0)) for node in nodes)
    use_gpu = config.device == "cuda"
    if config.accelerator and not nodes:
        names = {name.partition(":")[2] for node in eligible_nodes() for name in node if "accelerator_type:" in name}
        known = ", ".join(sorted(names)) or "none"
        raise UserError(f"--accelerator {config.accelerator} is not in the cluster, which has {known}.")
    if use_gpu and gpus < config.workers:
        raise UserError(f"--device cuda needs a GPU for each of --workers {config.workers}; Ray has {gpus}.")
    mine = cores_each(nodes, config.workers, gpu=use_gpu)
    if not mine:
        cores = sum(int(node.get("CPU", 0)) for node in nodes)
        raise UserError(f"--workers {config.workers} needs a core each and Ray has {cores}.")
    threads = mine
    if config.stream:
        cores = sum(int(node.get("CPU", 0)) for node in eligible_nodes())
        if cores - config.workers * mine < READERS * config.workers:
            threads = max(1, mine - READERS)
        if cores - config.workers * threads < config.workers:
            raise UserError(
                f"--stream needs a core for reading beside each of --workers {config.workers} and Ray has {cores}: "
                "make token shards with 'python -m pipeline.tokenize' and give them with --data."
            )
    return ray.train.ScalingConfig(
        num_workers=config.workers,
        use_gpu=use_gpu,
        # Ray sets a worker's OpenMP threads to its cores.
        resources_per_worker={"CPU": threads} | ({"GPU": 1} if use_gpu else {}),
        accelerator_type=config.accelerator,
    )


@contextmanager
def stop_on_signal(flag: Path) -> Iterator[list[float]]:
    """While the block runs, the first SIGINT or SIGTERM creates ``flag``; a second one, then or later, ends us.

    The list that it gives holds from then on when that was, by ``time.monotonic``.
    """
    asked: list[float] = []

    def handle(signum: int, frame: object) -> None:
        if flag.exists():
            os._exit(INTERRUPTED)
        flag.touch()
        asked.append(time.monotonic())
        errors.print("\nStopping after this step and saving; once more to leave at once.")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        if not flag.exists():
            for number, handler in previous.items():
                signal.signal(number, handler)
