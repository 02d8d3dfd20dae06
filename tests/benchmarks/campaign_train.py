"""A run killed at many random moments, and what it then computed: losses and curves of a run left alone?

    python tests/benchmarks/campaign_train.py --data data/tokens [--kills 20] [--seed 0] [--record FILE.json]

Each time one of: SIGKILL of the worker (Ray starts it again), SIGKILL of the driver, SIGINT, SIGTERM. After
the last one the run is left to finish. Its losses must equal, bit for bit, those of the bare loop left
alone, and every metric in MLflow must have each step once.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from mlflow.tracking import MlflowClient

from train.config import config_from_json
from train.folder import RunFolder
from train.loop import Trainer
from train.result import CycleReport

WAYS = ("worker", "driver", "interrupt", "terminate")


def main() -> None:
    """Kill, continue, compare, record; exit 1 when anything differs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="tiny,width=32,context_length=32")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    chance = random.Random(options.seed)
    folder = Path(tempfile.mkdtemp(prefix="campaign-"))
    home = RunFolder(folder / "runs" / "campaign")
    first = [
        "--data", str(options.data.resolve()), "--name", "campaign", "--model", options.model, "--steps",
        str(options.steps), "--global-batch", "8", "--micro-batch", "4", "--cycle", "20+1", "--checkpoint-every", "15",
        "--device", "cpu",
    ]  # fmt: skip
    events: list[dict[str, object]] = []
    driver = start(folder, first)
    while len(events) < options.kills:
        way = chance.choice(WAYS)
        if not checkpoint_comes(home, driver):
            break
        time.sleep(chance.uniform(0, 3))
        if driver.poll() is not None:
            break
        step = stands_at(home)
        asked = time.monotonic()
        if kill(driver, way):
            events.append({"way": way, "checkpoint_step": step})
            if way != "worker":
                code = driver.wait(timeout=60)
                events[-1] |= {"exit": code, "seconds": round(time.monotonic() - asked, 1)}
                driver = start(folder, ["--resume", "campaign"])
            print(events[-1], flush=True)
    output, _ = driver.communicate()
    verdict = compare(home, folder, options.steps)
    print(f"{len(events)} kills; last exit {driver.returncode}; {verdict}")
    if options.record:
        counts = Counter(str(event["way"]) for event in events)
        options.record.write_text(
            json.dumps({"kills": counts, "exit": driver.returncode, **verdict, "events": events}, indent=2) + "\n"
        )
    if driver.returncode or not all(verdict.values()):
        print(output)
        sys.exit(1)


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
    """Wait until the run has got further than it stands; False when it ended."""
    before = stands_at(home)
    while driver.poll() is None:
        if stands_at(home) > before:
            return True
        time.sleep(0.05)
    return False


def kill(driver: subprocess.Popen[str], way: str) -> bool:
    """Do it; False when there was nobody to kill just then."""
    if way == "worker":
        family = psutil.Process(driver.pid).children(recursive=True)
        workers = [child for child in family if child.is_running() and "TrainWorker" in " ".join(child.cmdline()[:1])]
        for worker in workers:
            worker.kill()
        return bool(workers)
    driver.send_signal({"driver": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}[way])
    return True


def compare(home: RunFolder, folder: Path, steps: int) -> dict[str, bool]:
    """What must hold of the finished run."""
    cycles = [json.loads(line) for line in home.cycles.read_text().splitlines()]
    straight: list[CycleReport] = []
    Trainer(config_from_json(json.loads(home.config.read_text()), "config"), on_cycle=straight.append).run()
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
