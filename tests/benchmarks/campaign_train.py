"""Does a run that is killed at random moments compute the same losses and curves as one that is not disturbed?

    python -P tests/benchmarks/campaign_train.py --data data/tokens --record FILE.json [--kills 20]

Each kill is SIGKILL of the worker (with Ray, which starts it again), of the driver, or of the driver with every
process below it, as when the machine dies. After the last one the run is left to finish. Its losses must equal, bit
for bit, those of the undisturbed bare loop, and every metric in MLflow must have each step once. Runs that
the record holds already are not repeated, so a long campaign can be done in parts.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from mlflow.tracking import MlflowClient

from infra.storage.files import write_json
from train.config import config_from_json
from train.data.sources import source_of
from train.loop.trainer import Callbacks, Trainer
from train.resolved import resolve_local
from train.result import CycleReport
from train.run_files.run_folder import RunFolder

WAYS = ("worker", "driver", "machine")
KILLS_PER_RUN = 5


def main() -> None:
    """Do the runs that the record lacks; exit 1 when anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--model", default="tiny,width=32,context_length=32,dropout=0.1")
    parser.add_argument("--kills", type=int, default=20, help=f"in all, {KILLS_PER_RUN} in each run")
    parser.add_argument("--steps", type=int, default=400, help="of each run")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # sums depend on the number
    runs = json.loads(options.record.read_text())["runs"] if options.record.exists() else []
    for seed in range(len(runs), options.kills // KILLS_PER_RUN):
        runs.append(one_run(options, seed))
        print(runs[-1], flush=True)
        kills = Counter(event["way"] for run in runs for event in run["events"])
        as_asked = all(not run["exit"] and all(run["verdict"].values()) for run in runs)
        versions = {name: version(name) for name in ("torch", "ray", "mlflow")}
        about = {"model": options.model, "steps": options.steps, "versions": versions}
        record = {"kills": kills, "total": kills.total(), "all_as_left_alone": as_asked, **about, "runs": runs}
        write_json(options.record, record)
        if not as_asked:
            sys.exit(1)


def one_run(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Start a run, kill and continue it at random moments by ``seed``, let it finish, compare."""
    chance = random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    home = RunFolder(folder / "runs" / "campaign")
    first = [
        "--data", str(options.data.resolve()), "--name", "campaign", "--model", options.model, "--steps",
        str(options.steps), "--seed", str(seed), "--global-batch", "8", "--micro-batch", "4", "--cycle", "20+1",
        "--checkpoint-every", "15", "--device", "cpu",
    ]  # fmt: skip
    events: list[dict[str, Any]] = []
    driver = start(folder, first)
    while len(events) < KILLS_PER_RUN and checkpoint_comes(home, driver):
        way = chance.choice(WAYS)
        time.sleep(chance.uniform(0, 3))
        step = stands_at(home)
        if driver.poll() is None and kill(driver, way):
            events.append({"way": way, "checkpoint_step": step})
            if way != "worker":
                driver.communicate()
                driver = start(folder, ["--resume", "campaign"])
    output, _ = driver.communicate()
    verdict = compare(home, folder, options.steps)
    if driver.returncode or not all(verdict.values()):
        print(output)
    else:
        shutil.rmtree(folder)
    return {"seed": seed, "events": events, "exit": driver.returncode, "verdict": verdict}


def start(folder: Path, flags: list[str]) -> subprocess.Popen[str]:
    """The command, in ``folder``."""
    return subprocess.Popen(
        [sys.executable, "-m", "train.run", *flags], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def stands_at(home: RunFolder) -> int:
    """The step of the newest checkpoint, 0 without one."""
    return max((int(path.name.removeprefix("step-")) for path in home.checkpoints.glob("step-*")), default=0)


def checkpoint_comes(home: RunFolder, driver: subprocess.Popen[str]) -> bool:
    """Wait until the run has made progress; False when it ended."""
    before = stands_at(home)
    while driver.poll() is None:
        if stands_at(home) > before:
            return True
        time.sleep(0.05)
    return False


def kill(driver: subprocess.Popen[str], way: str) -> bool:
    """Do it; False when there was nothing to kill just then."""
    family = psutil.Process(driver.pid).children(recursive=True)
    if way == "worker":
        victims = [child for child in family if child.is_running() and "TrainWorker" in " ".join(child.cmdline()[:1])]
    else:
        victims = [psutil.Process(driver.pid), *(family if way == "machine" else [])]
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    return bool(victims)


def compare(home: RunFolder, folder: Path, steps: int) -> dict[str, bool]:
    """What must hold of the finished run."""
    cycles = [json.loads(line) for line in home.cycles.read_text().splitlines()]
    straight: list[CycleReport] = []
    config = resolve_local(config_from_json(json.loads(home.config.read_text()), "config"))
    data = source_of(config.dataset).open(config.model, config.batch, config.duration.cycle)
    Trainer(config, data, Callbacks(on_cycle=straight.append)).run()
    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("train")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(runs[0].info.run_id, "loss/step")
    ends = [report.step for report in straight]
    return {
        "losses_equal_bit_for_bit": [c["step_losses"] for c in cycles] == [r.step_losses for r in straight],
        "validation_equal_bit_for_bit": [c["val_loss"] for c in cycles] == [r.val_loss for r in straight],
        "one_mlflow_run": len(runs) == 1,
        "every_step_once_in_mlflow": [point.step for point in history] == list(range(1, steps + 1)),
        "mlflow_equals_the_log": [p.value for p in history] == [loss for r in straight for loss in r.step_losses],
        "every_cycle_once_in_mlflow": all(
            [p.step for p in client.get_metric_history(runs[0].info.run_id, name)] == ends
            for name in ("loss/train", "loss/val", "optimizer/learning_rate")
        ),
        "no_partial_files_left": not list(home.checkpoints.glob(".*")),
    }


if __name__ == "__main__":
    main()
