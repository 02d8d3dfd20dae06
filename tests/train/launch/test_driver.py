"""What the driver hands to the worker of a run in its own process, and what it makes of what comes back."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from infra.device.hardware import cpu_info
from infra.errors import UserError
from infra.tracking.store import create_run
from infra.tracking.tracker import Tracker
from pipeline.shards import read_manifest
from train.config import ResolvedConfig, TrainConfig
from train.estimate.memory import predict_peak
from train.launch import driver, local
from train.launch.driver import WorkerFailure, launch, train_and_record
from train.launch.job import RunPlan, WorkerJob, WorkerResult
from train.model_config import ModelConfig
from train.resolved import resolve
from train.result import RunResult
from train.run_files.progress import Progress
from train.run_files.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("working_folder")


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    """Of a request that leaves the micro-batch open, which becomes 8."""
    return resolve(TrainConfig.of(data=str(small_shards), model=small_model, global_batch=8), cpu_info())


@pytest.fixture
def run(config: ResolvedConfig, tmp_path: Path) -> RunPlan:
    return RunPlan(config.requested, read_manifest(config.dataset.data), RunFolder(tmp_path / "one"))


class Worker:
    """Stands in for the process's training: what it was told, and what it returns."""

    def __init__(self, returned: WorkerResult) -> None:
        self.returned = returned
        self.told: list[tuple[WorkerJob, int, int]] = []

    def start(self, assignment: WorkerJob, listener: object, reported: int, second: int) -> WorkerResult:
        self.told.append((assignment, reported, second))
        return self.returned


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, make_result: Callable[..., RunResult]) -> Worker:
    worker = Worker(WorkerResult(make_result()))
    monkeypatch.setattr(local, "run_training", worker.start)
    return worker


def test_a_worker_is_told_what_its_run_is(run: RunPlan, config: ResolvedConfig, worker: Worker) -> None:
    """Every field of what it is told, for a new run and for one that continues, whose numbers differ."""
    progress = Progress(
        step=7, position=56, reported=5, elapsed=2.0, data_fingerprint="", tokenizer_sha256="", config={}
    )
    continued = replace(
        run,
        progress=progress,
        memory_limit=5 * 10**9,
        requested=run.requested.replace(micro_batch=config.batch.micro_batch),
    )
    with Tracker(create_run("train", "one")) as tracker:
        launch(run, config, tracker)
        tracker.log_metrics({"system/worker_cpu_percent": 99.0}, 40)
        tracker.log_metrics({"system/worker_memory_gb": 1.0}, 41)
        tracker.log_metrics({"loss/step": 1.0}, 50)
        launch(continued, replace(config, requested=continued.requested), tracker)
    new = WorkerJob(
        config=config, run_dir=run.run_folder.location, fingerprint=run.manifest.fingerprint,
        step=0, memory_limit=None,
        source=None, retries_smaller_batch=True, driver_marker=None,
    )  # fmt: skip
    assert worker.told == [
        (new, 0, 0),
        (replace(new, step=7, memory_limit=5 * 10**9, retries_smaller_batch=False), 5, 41),
    ]


def test_what_is_left_of_an_earlier_run_is_removed_unless_it_is_continued(
    run: RunPlan, config: ResolvedConfig, worker: Worker
) -> None:
    checkpoint = run.run_folder.checkpoints / "step-00000007"
    progress = Progress(step=7, data_fingerprint="", tokenizer_sha256="", config={})
    with Tracker(create_run("train", "one")) as tracker:
        checkpoint.mkdir(parents=True)
        launch(replace(run, progress=progress), config, tracker)
        assert checkpoint.exists()
        launch(run, config, tracker)
        assert not checkpoint.exists()


def test_a_worker_that_gave_no_result_ends_the_run_with_its_reason(
    run: RunPlan, config: ResolvedConfig, worker: Worker
) -> None:
    with Tracker(create_run("train", "one")) as tracker:
        worker.returned = WorkerResult(user_error="the data are gone.")
        with pytest.raises(UserError, match="the data are gone"):
            launch(run, config, tracker)
        worker.returned = WorkerResult(traceback="Traceback of a bug")
        with pytest.raises(WorkerFailure, match="of a bug"):
            launch(run, config, tracker)


def test_a_result_is_recorded_as_that_of_the_micro_batch_that_fitted(
    run: RunPlan, config: ResolvedConfig, worker: Worker, make_result: Callable[..., RunResult]
) -> None:
    """After two that did not: in the folder, in MLflow, and with the memory that is predicted of it and its limit."""
    worker.returned = WorkerResult(make_result(too_large=(8, 4), outcome="interrupted"))
    fitted = config.replace(micro_batch=2)
    with Tracker(create_run("train", "one")) as tracker:
        result, _ = train_and_record(replace(run, memory_limit=3 * 10**9), config, tracker)
    kept: dict[str, Any] = json.loads(run.run_folder.result.read_text())
    assert result.predicted_memory == kept["predicted_memory"] == predict_peak(fitted).total
    client = MlflowClient(tracker.run_ref.store)
    found = client.get_run(tracker.run_ref.run_id)
    assert found.info.status == "KILLED"
    in_mlflow = Path(client.download_artifacts(tracker.run_ref.run_id, "config.json")).read_text()
    assert json.loads(in_mlflow) == fitted.to_json()
    summary = run.run_folder.summary.read_text()
    assert "micro-batch 2 x accumulation 4 " in summary
    assert re.search(rf"3\.00 GB.*{predict_peak(fitted).total / 1e9:.2f}", summary)
    assert driver.diagnosed(run, fitted, result) is None
