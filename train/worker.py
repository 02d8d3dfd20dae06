"""The Ray Train wrapper: a config in, a RunResult out, the loop running in a worker that Ray supervises.

The driver and the worker share the run's folder: the worker appends each cycle to ``cycles.jsonl``,
which the driver follows for the terminal, and the driver asks for a clean stop by creating ``STOP``,
because Ray Train runs the loop in a thread where signals do not arrive. Both survive either side's
death, and neither costs an actor or a call into Ray during training.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch

from infra.cluster import connected
from infra.command import INTERRUPTED, UserError
from infra.tracking import RunKey, Tracker
from train.config import TrainConfig, config_from_json
from train.loop import Trainer
from train.result import CycleReport, RunResult

CYCLES, STOP = "cycles.jsonl", "STOP"
POLL_SECONDS = 0.2


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

    Ctrl-C and SIGTERM finish the step, save and return the outcome ``interrupted``; a second one exits at
    once. Raises ``UserError`` when the cluster lacks what the config asks for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STOP).unlink(missing_ok=True)
    cycles = folder / CYCLES
    seen = cycles.stat().st_size if cycles.exists() else 0
    payload = {
        "config": config.to_json() | {"data": str(config.data.resolve())},
        "folder": str(folder),
        "key": asdict(key),
        "resume": str(resume) if resume else None,
    }
    with connected(address):
        gpus = ray.cluster_resources().get("GPU", 0)
        use_gpu = config.device == "cuda" or (config.device == "auto" and gpus >= config.workers)
        if use_gpu and gpus < config.workers:
            raise UserError(f"--device cuda needs a GPU for each of --workers {config.workers}; Ray has {gpus:g}.")
        trainer = ray.train.torch.TorchTrainer(
            train_function,
            train_loop_config=payload,
            scaling_config=ray.train.ScalingConfig(
                num_workers=config.workers,
                use_gpu=use_gpu,
                resources_per_worker={"CPU": cpus_per_worker(config.workers)} | ({"GPU": 1} if use_gpu else {}),
            ),
            run_config=ray.train.RunConfig(name=f"ray-{os.getpid()}", storage_path=str(folder)),
        )
        done: list[Any] = []

        def fit() -> None:
            try:
                done.append(trainer.fit())
            except BaseException as failure:  # noqa: BLE001 carried to the main thread, which raises it
                done.append(failure)

        thread = threading.Thread(target=fit, name="ray-train", daemon=True)
        with stop_on_signal(folder / STOP):
            thread.start()
            while thread.is_alive():
                thread.join(POLL_SECONDS)
                seen = follow(cycles, seen, on_cycle)
    if isinstance(done[0], BaseException):
        raise done[0]
    return RunResult.from_json(done[0].return_value)


def cpus_per_worker(workers: int) -> int:
    """Cores for each worker, which also sets its OpenMP threads. Raises ``UserError`` when there are too few."""
    cores = int(ray.cluster_resources().get("CPU", 0))
    if cores < workers:
        raise UserError(f"--workers {workers} needs a core each and Ray has {cores}.")
    return cores // workers


def train_function(payload: dict[str, Any]) -> dict[str, Any]:
    """What runs in Ray's worker: the bare loop, with its cycles sent to the folder and to MLflow."""
    folder = Path(payload["folder"])
    with Tracker(RunKey(**payload["key"])) as tracker:

        def on_cycle(report: CycleReport) -> None:
            with (folder / CYCLES).open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(report) | {"line": report.line()}) + "\n")
            tracker.metrics(cycle_metrics(report), report.step)
            first = report.step - len(report.step_losses) + 1
            for step, loss in enumerate(report.step_losses, first):
                tracker.metrics({"loss/step": loss}, step)

        trainer = Trainer(
            config_from_json(payload["config"], "the run's config"),
            on_cycle=on_cycle,
            should_stop=(folder / STOP).exists,
            checkpoints=folder / "checkpoints",
            resume=Path(payload["resume"]) if payload["resume"] else None,
        )
        return trainer.run().to_json()


def cycle_metrics(report: CycleReport) -> dict[str, float | None]:
    """A cycle's metrics under MLflow's grouped names."""
    return {
        "loss/train": report.train_loss,
        "loss/val": report.val_loss,
        "throughput/tokens_per_second": report.cycle_tokens / report.seconds,
        "throughput/train_tokens_per_second": len(report.step_losses)
        and (report.train_tokens / report.step * len(report.step_losses) / report.train_seconds),
        "progress/train_tokens": report.train_tokens,
        "progress/books": report.books,
        "time/elapsed_seconds": report.elapsed,
        "time/data_wait_seconds": report.data_wait_seconds,
        "optimizer/learning_rate": report.learning_rate,
        "optimizer/gradient_norm": report.gradient_norm,
    }


def follow(path: Path, position: int, on_cycle: Callable[[dict[str, Any]], None]) -> int:
    """Hand on the whole lines appended to ``path`` after byte ``position``; returns the position behind them."""
    if path.exists():
        with path.open("rb") as file:
            file.seek(position)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                position += len(line)
                on_cycle(json.loads(line))
    return position


@contextmanager
def stop_on_signal(flag: Path) -> Iterator[None]:
    """While the block runs, the first SIGINT or SIGTERM creates ``flag``; a second one exits at once."""

    def handle(signum: int, frame: object) -> None:
        if flag.exists():
            os._exit(INTERRUPTED)
        flag.touch()
        print("\nStopping after this step and saving; once more to leave at once.", file=sys.stderr, flush=True)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
