"""A run in the command's own process: what goes wrong around it does not cost what it has computed."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.device.hardware import cpu_info
from infra.tracking.store import create_run
from infra.tracking.tracker import Tracker
from train.config import Cycle, ResolvedConfig
from train.launch import driver
from train.launch.job import RunPlan
from train.model_config import ModelConfig
from train.run_files.progress import newest, read_progress
from train.run_files.run_folder import RunFolder


def test_a_run_whose_cycles_cannot_be_recorded_any_longer_is_saved_and_ended(
    small_shards: Path, small_model: ModelConfig, empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is full, for example. The thread that records them is also the one that passes on Ctrl-C.

    And torch has computed in no more threads than the process has cores.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    torch.set_num_threads(2)
    steps = 20_000
    config = ResolvedConfig.of(
        data=str(small_shards), model=small_model, global_batch=1, micro_batch=1, steps=steps, cycle=Cycle(2, 0),
        precision="fp32", device="cpu", compile="off", loss="plain", checkpoint_every=steps,
    )  # fmt: skip
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    home = RunFolder(tmp_path / "run")

    def fail(cycle: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with (
        Tracker(create_run("train", "run", tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")) as tracker,
        pytest.raises(OSError, match="No space left"),
    ):
        driver.train_and_record(RunPlan.new(config, home).resolved(cpu_info()), tracker, fail)
    assert torch.get_num_threads() == 1
    saved = newest(home.checkpoints)
    assert saved
    assert 2 <= read_progress(saved).step < steps
