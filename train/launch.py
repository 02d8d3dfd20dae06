"""The driver's side of a run on Ray Train: start the worker, follow what it reports, record it in MLflow.

In: a config and the run's tracker. Out: a RunResult. A worker that dies is started again and goes on from
the newest checkpoint in the run's folder. What it then does again is neither printed nor sent to MLflow
twice, and what was lost on the way there is sent. The worker itself knows nothing of MLflow: importing it
and opening its store took three of the seconds before the first step, and its thread ran beside the loop.
"""

import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
from ray.exceptions import RayActorError
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback

from infra.cluster import connected, ray_files
from infra.command import INTERRUPTED, UserError, errors
from infra.tracking import Tracker, last_steps
from train.config import TrainConfig
from train.controller import Alone, AsItIs
from train.execution import worker_environment
from train.folder import Follower, RunFolder
from train.progress import read_progress
from train.report import cycle_metrics
from train.result import RunResult
from train.source import absolute
from train.worker import train_function

POLL_SECONDS = 0.2
READERS = 2
"""Cores that are left to Ray Data by each worker that trains on a stream."""


class ControllerDied(UserError):
    """Ray Train's own process is gone, and what its workers held stays taken until our command ends."""


class WorkerFailure(Exception):
    """The loop failed in its worker; the text is the worker's traceback."""


def run(
    config: TrainConfig,
    folder: Path,
    *,
    tracker: Tracker,
    resume: Path | None = None,
    address: str | None = None,
    on_cycle: Callable[[dict[str, Any]], None] = lambda cycle: None,
) -> RunResult:
    """Train through Ray Train in ``folder`` (absolute, shared with the workers), recording to ``tracker``.

    With ``resume``, the newest checkpoint of the folder, the run goes on; without, what an earlier run left
    there is removed. Ctrl-C and SIGTERM finish the step, save and return the outcome ``interrupted``; a
    second one exits at once. Raises ``UserError`` when the cluster lacks what the config asks for,
    ``ControllerDied``, and ``WorkerFailure`` for our bugs.
    """
    home = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    home.stop.unlink(missing_ok=True)
    home.refused.unlink(missing_ok=True)  # of a run that was killed before its workers had read it
    reported, sent = 0, dict[str, int]()
    if resume:
        reported = read_progress(resume).reported
        tracker.flush()
        sent = last_steps(tracker.key)
    else:
        shutil.rmtree(home.checkpoints, ignore_errors=True)
        home.cycles.unlink(missing_ok=True)

    def hand_on(cycle: dict[str, Any]) -> None:
        for step, values in cycle_metrics(cycle):
            tracker.metrics({name: value for name, value in values.items() if step > sent.get(name, 0)}, step)
        if cycle["step"] > reported:
            on_cycle(cycle)

    follower = Follower(home.cycles, hand_on)
    with ray_files(folder) as place, connected(address, prestart=False):
        wanted = scaling(config)
        trainer = TorchTrainer(
            train_function,
            train_loop_config={"config": absolute(config).to_json(), "folder": str(folder)},
            torch_config=Alone() if config.workers == 1 else None,  # type: ignore[arg-type]
            scaling_config=wanted,
            run_config=ray.train.RunConfig(
                name=place.name,
                storage_path=str(folder),
                worker_runtime_env={"env_vars": worker_environment(config, "cuda" if wanted.use_gpu else "cpu")},
                failure_config=ray.train.FailureConfig(max_failures=-1),  # train_function counts what matters
            ),
        )
        done: list[Any] = []

        def fit() -> None:
            try:
                done.append(trainer.fit())
            except BaseException as failure:  # noqa: BLE001 carried to the main thread, which raises it
                done.append(failure)

        thread = threading.Thread(target=fit, name="ray-train", daemon=True)
        with stop_on_signal(home.stop):
            thread.start()
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                follower.poll()
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
    return RunResult.from_json(returned)


class TorchTrainer(ray.train.torch.TorchTrainer):
    """Ray's, without three of its processes: five seconds of a core at every start, and one of waiting at the end.

    One hands out Ray data sets, of which there are none. One frees the workers' resources when Ray Train's
    controller dies and its job lives on, which ends with our command. One asks a cluster to grow, and ``scaling``
    has refused what this one cannot hold.
    """

    def _create_default_callbacks(self) -> list[Any]:
        unneeded = (DatasetsCallback, PlacementGroupCleanerCallback)
        return [made for made in super()._create_default_callbacks() if not isinstance(made, unneeded)]

    def _initialize_and_run_controller(self, **parts: Any) -> ray.train.Result:
        return super()._initialize_and_run_controller(**parts | {"scaling_policy": AsItIs(self.scaling_config)})


def scaling(config: TrainConfig) -> ray.train.ScalingConfig:
    """The workers to ask Ray for. Raises ``UserError`` when the cluster lacks them, for which Ray would wait."""
    resources = ray.cluster_resources()
    gpus, cores = resources.get("GPU", 0), int(resources.get("CPU", 0))
    use_gpu = config.device == "cuda" or (config.device == "auto" and gpus >= config.workers)
    if use_gpu and gpus < config.workers:
        raise UserError(f"--device cuda needs a GPU for each of --workers {config.workers}; Ray has {gpus:g}.")
    if cores < config.workers:
        raise UserError(f"--workers {config.workers} needs a core each and Ray has {cores}.")
    if config.accelerator and not resources.get(f"accelerator_type:{config.accelerator}"):
        known = [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
        raise UserError(f"--accelerator {config.accelerator} is not in the cluster, which has {known or 'none'}.")
    mine = cores // config.workers
    if config.stream and mine < 2:
        raise UserError(
            f"--stream needs a core for reading beside each of --workers {config.workers} and Ray has {cores}: make "
            "token shards with 'python -m pipeline.tokenize' and give them with --data."
        )
    threads = max(1, mine - READERS) if config.stream else mine
    return ray.train.ScalingConfig(
        num_workers=config.workers,
        use_gpu=use_gpu,
        # Ray sets a worker's OpenMP threads to its cores.
        resources_per_worker={"CPU": threads} | ({"GPU": 1} if use_gpu else {}),
        accelerator_type=config.accelerator,
    )


@contextmanager
def stop_on_signal(flag: Path) -> Iterator[None]:
    """While the block runs, the first SIGINT or SIGTERM creates ``flag``; a second one, then or later, ends us."""

    def handle(signum: int, frame: object) -> None:
        if flag.exists():
            os._exit(INTERRUPTED)
        flag.touch()
        errors.print("\nStopping after this step and saving; once more to leave at once.")

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if not flag.exists():
            for number, handler in previous.items():
                signal.signal(number, handler)
