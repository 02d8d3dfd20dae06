"""What the driver does with what its worker says; the tracker stands in for MLflow."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from infra.schema import to_json
from infra.storage.directory import StorageDir
from infra.tracking.tracker import Tracker
from pipeline.shards import read_manifest
from train.config import ResolvedConfig
from train.launch.channel import WorkerUpdates
from train.launch.job import RunPlan
from train.launch.listener import Listener
from train.model_config import ModelConfig
from train.result import TRAINING, CycleReport
from train.run_files.progress import Progress
from train.run_files.run_folder import RunFolder


class Recorded:
    """What a tracker, and the live line, are told."""

    def __init__(self) -> None:
        self.points: list[tuple[int, str, float]] = []
        self.labels: dict[str, str] = {}
        self.line = ""

    def log_metrics(self, values: dict[str, float | None], step: int = 0) -> None:
        self.points += [(step, name, value) for name, value in values.items() if value is not None]

    def set_tags(self, values: dict[str, str]) -> None:
        self.labels |= values

    def update(self, what: str, more: str = "") -> None:
        self.line = f"{what} {more}"


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, micro_batch=4, global_batch=8, time_budget=120.0
    )


@pytest.fixture
def run(config: ResolvedConfig, tmp_path: Path) -> RunPlan:
    return RunPlan(config, read_manifest(config.dataset.data), RunFolder(tmp_path))


@pytest.fixture
def cycle(distinct: Callable[..., Any]) -> dict[str, Any]:
    report = distinct(CycleReport, step=12, step_losses=[3.0, 2.0], val_loss=2.5, seconds=2.0)
    return to_json(report) | {"line": report.format_line()}


def listener_of(run: RunPlan) -> tuple[Listener, Recorded, list[dict[str, Any]]]:
    recorded, cycles = Recorded(), list[dict[str, Any]]()
    config = ResolvedConfig.of_decided(run.requested)
    return Listener(run, config, cast(Tracker, recorded), cycles.append), recorded, cycles


def test_what_a_worker_says_is_recorded_and_passed_on(
    run: RunPlan, cycle: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    listener, recorded, cycles = listener_of(run)
    about = {"hosts": ["w1"], "nodes": ["a"], "machine": {"host": "w1", "gpu": "H100"}}
    news = [
        ("worker_started", about),
        ("print_line", "w1 [fetches] it"),
        ("cycle", cycle),
        ("system", (40, {"system/cpu": 5.0})),
    ]
    shown: Any = Recorded()
    listener.take(WorkerUpdates(news, activity=("loading the data", 0)), shown)
    assert cycles == [cycle]
    assert recorded.labels == {"worker": "w1", "gpu": "H100"}
    assert "w1 [fetches] it" in capsys.readouterr().out
    assert (40, "system/cpu", 5.0) in recorded.points
    losses = [(step, name, value) for step, name, value in recorded.points if name.startswith("loss/")]
    assert losses == [
        (11, "loss/step", 3.0), (12, "loss/step", 2.0), (12, "loss/train", cycle["train_loss"]), (12, "loss/val", 2.5),
    ]  # fmt: skip
    assert shown.line.strip() == "loading the data"


def test_the_drivers_copy_of_a_remote_run_has_the_cycles_that_the_worker_keeps_elsewhere(
    run: RunPlan, cycle: dict[str, Any], tmp_path: Path
) -> None:
    """A run in this process, or on a disk that is shared, has them already."""
    shown: Any = Recorded()
    for home, logged in ((run.run_folder, []), (RunFolder(tmp_path, StorageDir.of("s3://bucket/runs/one")), [12])):
        listener, _, _ = listener_of(replace(run, run_folder=home))
        listener.take(WorkerUpdates([("cycle", cycle)]), shown)
        kept = home.cycles.read_text().splitlines() if home.cycles.exists() else []
        assert [json.loads(line)["step"] for line in kept] == logged


def test_the_time_that_is_left_counts_from_where_a_run_is_continued(run: RunPlan) -> None:
    progress = Progress(step=7, elapsed=90.0, data_fingerprint="", tokenizer_sha256="", config={})
    for known, left in ((None, "2m left"), (progress, "30s left")):
        listener, _, _ = listener_of(replace(run, progress=known))
        shown: Any = Recorded()
        listener.take(WorkerUpdates(activity=(TRAINING, 8)), shown)
        assert "step 8" in shown.line
        assert left in shown.line
