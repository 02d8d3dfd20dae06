"""The Ray Train wrapper: a config in, a RunResult out, the loop running in workers that Ray supervises.

A worker that dies is started again and goes on from the newest checkpoint in the run's folder. What it
then does again is neither printed nor sent to MLflow twice, and what was lost on the way there is sent.
"""

import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch

from infra.cluster import connected
from infra.command import INTERRUPTED, UserError
from infra.run_key import RunKey
from infra.tracking import Tracker, last_steps
from pipeline.stream import Stream
from train.config import TrainConfig, config_from_json
from train.data import ShardData
from train.folder import Follower, RunFolder
from train.generate import closing_sample
from train.loop import Trainer
from train.progress import newest, read_progress
from train.report import cycle_metrics
from train.result import CycleReport, RunResult
from train.source import absolute
from train.stream import StreamData

POLL_SECONDS = 0.2
READERS = 2
"""Cores that are left to Ray Data by each worker that trains on a stream."""
ATTEMPTS = 3
"""Starts from the same step after which a worker that dies is not started again."""


class WorkerFailure(Exception):
    """The loop failed in its worker; the text is the worker's traceback."""


def run(
    config: TrainConfig,
    folder: Path,
    *,
    key: RunKey,
    resume: Path | None = None,
    address: str | None = None,
    on_cycle: Callable[[dict[str, Any]], None] = lambda cycle: None,
) -> RunResult:
    """Train through Ray Train in ``folder`` (absolute, shared with the workers), recording to ``key``.

    With ``resume``, the newest checkpoint of the folder, the run goes on; without, what an earlier run left
    there is removed. Ctrl-C and SIGTERM finish the step, save and return the outcome ``interrupted``; a
    second one exits at once. Raises ``UserError`` when the cluster lacks what the config asks for, and
    ``WorkerFailure`` for our bugs.
    """
    home = RunFolder(folder)
    folder.mkdir(parents=True, exist_ok=True)
    home.stop.unlink(missing_ok=True)
    for leftover in folder.glob("ray-*"):  # of a driver that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    follower = Follower(home.cycles, on_cycle)
    if resume:
        follower.last = read_progress(resume).reported
    else:
        shutil.rmtree(home.checkpoints, ignore_errors=True)
        home.cycles.unlink(missing_ok=True)
    payload = {
        "config": absolute(config).to_json(),
        "folder": str(folder),
        "key": asdict(key),
    }
    ray_files = folder / f"ray-{os.getpid()}"
    with connected(address, prestart=False):
        trainer = ray.train.torch.TorchTrainer(
            train_function,
            train_loop_config=payload,
            scaling_config=scaling(config),
            run_config=ray.train.RunConfig(
                name=ray_files.name,
                storage_path=str(folder),
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
    shutil.rmtree(ray_files, ignore_errors=True)
    if isinstance(done[0], BaseException):
        raise done[0]
    returned = done[0].return_value
    if "refused" in returned:
        raise UserError(returned["refused"])
    if "failed" in returned:
        raise WorkerFailure(returned["failed"])
    return RunResult.from_json(returned)


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


def train_function(payload: dict[str, Any]) -> dict[str, Any]:
    """What runs in Ray's workers: the loop, from the folder's newest checkpoint if it has one."""
    home = RunFolder(Path(payload["folder"]))
    context = ray.train.get_context()
    first = context.get_world_rank() == 0
    try:
        with home.held() if first else nullcontext():
            return train(home, config_from_json(payload["config"], "the run's config"), RunKey(**payload["key"]), first)
    except UserError as mistake:
        return {"refused": str(mistake)}
    except Exception:
        if context.get_world_size() > 1:  # the others wait in a collective until Ray stops the group
            raise
        return {"failed": traceback.format_exc()}


def train(home: RunFolder, config: TrainConfig, key: RunKey, first: bool) -> dict[str, Any]:
    """Train as one worker of the run in ``home``; the ``first`` one also records. Gives the result as JSON."""
    resume = newest(home.checkpoints)
    data = StreamData(config, Stream(config.stream, config.seed)) if config.stream else ShardData(config)
    if not first:
        return Trainer(config, data=data, checkpoints=home.checkpoints, resume=resume).run().to_json()
    progress = read_progress(resume) if resume else None
    refuse_hopeless(home, progress.step if progress else 0)
    with Tracker(key) as tracker:
        sent = last_steps(key)

        def record(cycle: dict[str, Any]) -> None:
            for step, values in cycle_metrics(cycle):
                tracker.metrics({name: value for name, value in values.items() if step > sent.get(name, 0)}, step)

        def on_cycle(report: CycleReport) -> None:
            record(home.append(report))

        for cycle in home.rewind(progress.reported if progress else 0):
            record(cycle)
        trainer = Trainer(
            config,
            data=data,
            on_cycle=on_cycle,
            should_stop=home.stop.exists,
            checkpoints=home.checkpoints,
            resume=resume,
        )
        result = trainer.run()
        sample = closing_sample(trainer, result)
        if sample:
            tracker.text(sample, "sample.txt")
        if isinstance(data, StreamData):
            tracker.json(data.summary(), "stream.json")
    return replace(result, sample=sample).to_json()


def refuse_hopeless(home: RunFolder, step: int) -> None:
    """Raise ``UserError`` when workers started from ``step`` have died too often without a new checkpoint."""
    starts = home.path / "starts"
    earlier = starts.read_text().split() if starts.exists() else []
    starts.write_text("\n".join([*earlier, str(step)]) + "\n")
    if earlier[-ATTEMPTS:] == [str(step)] * ATTEMPTS:
        starts.unlink()
        raise UserError(
            f"the worker died {ATTEMPTS} times without getting from step {step} to another checkpoint: "
            "see Ray's logs for its end, and whether the machine has enough memory."
        )


@contextmanager
def stop_on_signal(flag: Path) -> Iterator[None]:
    """While the block runs, the first SIGINT or SIGTERM creates ``flag``; a second one, then or later, ends us."""

    def handle(signum: int, frame: object) -> None:
        if flag.exists():
            os._exit(INTERRUPTED)
        flag.touch()
        print("\nStopping after this step and saving; once more to leave at once.", file=sys.stderr, flush=True)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if not flag.exists():
            for number, handler in previous.items():
                signal.signal(number, handler)
