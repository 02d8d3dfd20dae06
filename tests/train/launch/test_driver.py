"""The job that the driver gives to the worker of a run, and what it does with the result."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from infra.errors import UserError
from infra.tracking.store import create_run
from infra.tracking.tracker import Tracker
from pipeline.shards import read_manifest
from train.config import AUTO, ResolvedConfig, TrainConfig
from train.estimate.memory import predict_peak
from train.launch.driver import WorkerFailure, diagnose, train_and_record
from train.launch.job import ResolvedRun, RunJob, WorkerResult
from train.launch.link import RecordedProgress
from train.launch.listener import Listener
from train.model_config import ModelConfig
from train.result import RunResult
from train.run_files.progress import Progress
from train.run_files.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("working_folder")


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    """Resolved from one that leaves the micro-batch open."""
    requested = TrainConfig.of(
        data=str(small_shards), model=small_model, global_batch=8, micro_batch=AUTO, precision="fp32", attention="sdpa",
        compile="off", loss="plain", allocator="default", device="cpu",
    )  # fmt: skip
    return ResolvedConfig.from_resolved(requested.replace(micro_batch=8), requested)


@pytest.fixture
def run(config: ResolvedConfig, tmp_path: Path) -> ResolvedRun:
    manifest = read_manifest(config.dataset.data)
    return ResolvedRun(config.requested, manifest, RunFolder(tmp_path / "one"), config=config)


class Worker:
    """Trains in place of the process: records its jobs, and returns what it is given."""

    def __init__(self, returned: WorkerResult) -> None:
        self.returned = returned
        self.jobs: list[tuple[RunJob, RecordedProgress]] = []

    def __call__(self, job: RunJob, listener: Listener) -> WorkerResult:
        self.jobs.append((job, listener.recorded))
        return self.returned


@pytest.fixture
def worker(make_result: Callable[..., RunResult]) -> Worker:
    return Worker(WorkerResult(make_result()))


def test_a_worker_gets_the_job_of_its_run(run: ResolvedRun, config: ResolvedConfig, worker: Worker) -> None:
    """Every field of it, for a new run and for one that continues, whose numbers differ."""
    progress = Progress(
        step=7, windows_consumed=56, last_reported_step=5, train_seconds=2.0, data_fingerprint="",
        tokenizer_sha256="", config={},
    )  # fmt: skip
    continued = replace(
        run,
        progress=progress,
        memory_limit=5 * 10**9,
        config=ResolvedConfig.from_resolved(config),
    )
    with Tracker(create_run("train", "one")) as tracker:
        train_and_record(run, tracker, train=worker)
        tracker.log_metrics({"system/worker_cpu_percent": 99.0}, 40)
        tracker.log_metrics({"system/worker_memory_gb": 1.0}, 41)
        tracker.log_metrics({"loss/step": 1.0}, 50)
        train_and_record(continued, tracker, train=worker)
    new = RunJob(
        config=config, run_dir=run.run_folder.location, fingerprint=run.manifest.fingerprint,
        step=0, memory_limit=None,
        source=None, retries_smaller_batch=True, driver_marker=None,
    )  # fmt: skip
    assert worker.jobs == [
        (new, RecordedProgress(0, 0)),
        (replace(new, step=7, memory_limit=5 * 10**9, retries_smaller_batch=False), RecordedProgress(5, 41)),
    ]


def test_what_is_left_of_an_earlier_run_is_removed_unless_it_is_continued(run: ResolvedRun, worker: Worker) -> None:
    checkpoint = run.run_folder.checkpoints / "step-00000007"
    progress = Progress(step=7, data_fingerprint="", tokenizer_sha256="", config={})
    with Tracker(create_run("train", "one")) as tracker:
        checkpoint.mkdir(parents=True)
        train_and_record(replace(run, progress=progress), tracker, train=worker)
        assert checkpoint.exists()
        train_and_record(run, tracker, train=worker)
        assert not checkpoint.exists()


def test_a_worker_that_gave_no_result_ends_the_run_with_its_reason(run: ResolvedRun, worker: Worker) -> None:
    with Tracker(create_run("train", "one")) as tracker:
        worker.returned = WorkerResult(user_error="the data are gone.")
        with pytest.raises(UserError, match="the data are gone"):
            train_and_record(run, tracker, train=worker)
        worker.returned = WorkerResult(traceback="Traceback of a bug")
        with pytest.raises(WorkerFailure, match="of a bug"):
            train_and_record(run, tracker, train=worker)


def test_a_run_that_was_interrupted_in_its_first_step_leaves_nothing(
    run: ResolvedRun, worker: Worker, make_result: Callable[..., RunResult]
) -> None:
    reason = "stop requested in step 1, of which 3 of 120 micro-batches are lost"
    worker.returned = WorkerResult(make_result(outcome="interrupted", reason=reason, steps=0))
    with (
        Tracker(create_run("train", "one")) as tracker,
        pytest.raises(KeyboardInterrupt, match=r"nothing is saved .*3 of 120 micro-batches"),
    ):
        train_and_record(run, tracker, train=worker)
    assert not run.run_folder.result.exists()


def test_a_result_is_recorded_as_that_of_the_micro_batch_that_fitted(
    run: ResolvedRun, config: ResolvedConfig, worker: Worker, make_result: Callable[..., RunResult]
) -> None:
    """After two that did not: in the folder, in MLflow, and with the memory that is predicted of it and its limit."""
    worker.returned = WorkerResult(make_result(failed_micro_batches=(8, 4), outcome="interrupted"))
    fitted = config.replace(micro_batch=2)
    with Tracker(create_run("train", "one")) as tracker:
        result, _ = train_and_record(replace(run, memory_limit=3 * 10**9), tracker, train=worker)
    stored: dict[str, Any] = json.loads(run.run_folder.result.read_text())
    assert result.predicted_memory == stored["predicted_memory"] == predict_peak(fitted.step).total
    client = MlflowClient(tracker.run_ref.store)
    mlflow_run = client.get_run(tracker.run_ref.run_id)
    assert mlflow_run.info.status == "KILLED"
    in_mlflow = Path(client.download_artifacts(tracker.run_ref.run_id, "config.json")).read_text()
    assert json.loads(in_mlflow) == fitted.to_json()
    summary = run.run_folder.summary.read_text()
    assert "micro-batch 2 x accumulation 4 " in summary
    assert re.search(rf"3\.00 GB.*{predict_peak(fitted.step).total / 1e9:.2f}", summary)
    assert diagnose(run.fitted(result), result) is None
