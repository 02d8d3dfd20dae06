"""A search for the lowest loss with real Ray, whose driver and trial are killed: what was learned is not repeated."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.ray.cluster import ray_session
from tune import search
from tune.trial.row import read_rows

MODEL = "tiny,layers=1,heads=2,width=32,context_length=32,vocab_size=257,padded_vocab_size=320"


def losses(folder: Path) -> dict[str, list[float]]:
    """Losses of each trial in ``folder``, by the name of its own folder."""
    files = folder.glob("learned/*/losses.json")
    return {file.parent.name: [rung["loss"] for rung in json.loads(file.read_text())["losses"]] for file in files}


@pytest.mark.slow
def test_a_killed_search_continues_the_trial_that_was_learning(
    command: Callable[..., int], working_folder: Path, empty_store: Path, small_shards: Path, cluster: str
) -> None:
    shutil.copy(empty_store, working_folder)
    flags = [
        "--objective", "loss", "--train-time", "16s", "--knobs", "learning_rate=1e-2", "--data", str(small_shards),
        "--model", MODEL, "--device", "cpu", "--global-batch", "8", "--trial-steps", "8", "--name", "killed",
    ]  # fmt: skip
    driver = subprocess.Popen(
        [sys.executable, "-m", "tune.search", *flags], start_new_session=True, env=os.environ | {"RAY_ADDRESS": cluster}
    )
    folder, deadline = working_folder / "runs" / "killed", time.monotonic() + 200
    while not losses(folder) and time.monotonic() < deadline and driver.poll() is None:
        time.sleep(0.05)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()
    before, rows = losses(folder), read_rows(folder / "trials")
    assert before
    with ray_session(cluster):
        assert command(search.main, "--resume", "killed") == 0
    now = read_rows(folder / "trials")
    assert now[: len(rows)] == rows
    (key, known), *_ = before.items()
    learned = {row.key: [rung.loss for rung in row.rungs] for row in now}
    assert learned[key][: len(known)] == known
    assert len(learned[key]) > len(known)
    assert not (folder / "learned").exists()
