"""One run that is killed in every way and continued: its losses and its curves are those of a run left alone."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest
from mlflow.tracking import MlflowClient
from trainers import make_trainer

from train.config import config_from_json
from train.resolved import resolve_local
from train.result import CycleReport
from train.run_files.progress import checkpoints_in, newest
from train.run_files.run_folder import RunFolder

STEPS = 240
MODEL = "tiny,layers=2,heads=2,width=32,context_length=32,vocab_size=257,padded_vocab_size=320,dropout=0.1"


def start(folder: Path, *flags: str) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW")} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "train.run", *flags], cwd=folder, env=environment,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def wait_for_step(run: RunFolder, step: int, process: subprocess.Popen) -> None:
    """Wait until the run has a checkpoint at or behind ``step``."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        checkpoints = checkpoints_in(run.checkpoints) if run.checkpoints.exists() else []
        if checkpoints and int(checkpoints[-1].name.removeprefix("step-")) >= step:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    raise AssertionError(f"no checkpoint after step {step}")


def kill_worker(driver: subprocess.Popen) -> None:
    workers = []
    for child in psutil.Process(driver.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # which has ended since it was listed
            workers += [child] if "TrainWorker" in "".join(child.cmdline()[:1]) else []
    (worker,) = workers
    worker.kill()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "on_ray", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["in its own process", "begun on Ray"]
)
def test_a_run_survives_everything(on_ray: bool, small_shards: Path, tmp_path: Path) -> None:
    home = RunFolder(tmp_path / "runs" / "long")
    driver = start(
        tmp_path, "--data", str(small_shards), "--name", "long", "--model", MODEL, "--steps", str(STEPS),
        "--global-batch", "8", "--micro-batch", "1", "--cycle", "20+1", "--checkpoint-every", "15",
        "--device", "cpu", "--learning-rate", "3e-3", *(["--address", "local"] if on_ray else []),
    )  # fmt: skip
    wait_for_step(home, 15, driver)
    if on_ray:
        kill_worker(driver)
    wait_for_step(home, 45, driver)
    family = psutil.Process(driver.pid).children(recursive=True)
    for process in (psutil.Process(driver.pid), *family):  # as when the machine dies
        with suppress(psutil.NoSuchProcess):
            process.kill()
    driver.wait()
    psutil.wait_procs(family, timeout=10)
    reached = int(checkpoints_in(home.checkpoints)[-1].name.removeprefix("step-"))

    driver = start(tmp_path, "--resume", "long")
    wait_for_step(home, reached + 30, driver)
    os.killpg(driver.pid, signal.SIGTERM)  # a machine that is about to be taken away
    stop_requested_at = time.monotonic()
    printed, _ = driver.communicate(timeout=120)
    assert driver.returncode == 130, printed
    assert time.monotonic() - stop_requested_at < 30
    assert re.search(r"with: +python -m train\.run --resume long\n", printed)
    cycles = [json.loads(line) for line in home.cycles.read_text().splitlines()]
    assert len(checkpoints_in(home.checkpoints)) == 2
    assert not list(home.checkpoints.glob(".*"))

    config = config_from_json(json.loads(home.config.read_text()), "test")
    resumed: list[CycleReport] = []
    make_trainer(resolve_local(config), on_cycle=resumed.append, resume=newest(home.checkpoints)).run()
    straight: list[CycleReport] = []
    make_trainer(resolve_local(config), on_cycle=straight.append).run()
    actual = [(c["step"], c["step_losses"], c["val_loss"]) for c in [*cycles, *map(asdict, resumed)]]
    assert actual == [(r.step, r.step_losses, r.val_loss) for r in straight]

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs(["1"])
    assert run.info.status == "KILLED"
    curve = client.get_metric_history(run.info.run_id, "loss/step")
    assert [point.step for point in curve] == list(range(1, cycles[-1]["step"] + 1))
    assert [point.value for point in curve] == [loss for cycle in cycles for loss in cycle["step_losses"]]
    assert [p.step for p in client.get_metric_history(run.info.run_id, "loss/val")] == [c["step"] for c in cycles]
