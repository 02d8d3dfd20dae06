"""The search's children in MLflow: one a trial, complete whatever happened to the store meanwhile."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient
from trial_rows import changed, trial_row

from infra.cli.units import GB
from infra.tracking import orphaned_runs
from infra.tracking.names import MAX_TOP_LEVEL_METRICS
from infra.tracking.run_ref import RunRef
from infra.tracking.saved_views import COLUMNS, FIRST_WIDTHS, MEASUREMENT_COLUMNS, VIEWS
from infra.tracking.tracker import Tracker
from train.config import ResolvedConfig, TrainConfig
from train.intervals import Estimate
from train.model_config import ModelConfig
from tune.config import SearchConfig
from tune.experiment.search_plan import Search, make_search
from tune.experiment.tracking import (
    TRIAL_METRICS,
    TrialRuns,
    complete_orphaned_experiments,
    log_result,
    log_start,
    open_parent,
    trial_report,
)
from tune.reporting.report import SEARCH_METRICS, publish, search_report
from tune.space import Candidate
from tune.trial.row import Proposal, TrialRow, write_row
from tune.trial.run import TrialRequest


@pytest.fixture
def search(small_shards: Path, small_model: ModelConfig, tmp_path: Path) -> Search:
    """Sizes from 1 to 8, two the control, and two settings of a knob."""
    training = TrainConfig.of(data=str(small_shards), model=small_model, global_batch=8, micro_batch=2, device="cpu")
    return make_search(
        SearchConfig(training=training, name="one", knobs=("checkpointing=selective,full",), out=str(tmp_path))
    )


def finished(size: int, speed: float, **more: Any) -> TrialRow:
    return trial_row(
        key=f"m{size}", number=1, stage="probe", round=0, candidate=Candidate(size, (("checkpointing", "none"),)),
        accumulation=8 // size, node="w1",
        outcome="ok", reason="", seconds=10.0, tokens_per_second=speed, low=0.99 * speed, high=1.01 * speed, **more,
    )  # fmt: skip


def test_numbers_have_the_units_of_their_names(search: Search) -> None:
    row = finished(2, 100.0, memory=2 * GB, reserved=GB, allocated=GB // 2, predicted_memory=3.0 * GB)
    metrics = trial_report(search.record(RunRef("", "", "", "/one")), row).metrics()
    assert {name: value for name, value in metrics.items() if name.endswith("_gb")} == {
        "memory/process_gb": 2.0, "memory/reserved_gb": 1.0, "memory/allocated_gb": 0.5,
        "memory/predicted_gb": 3.0,
    }  # fmt: skip
    assert metrics["time/trial_seconds"] == 10.0
    assert metrics["result/tokens_per_second_low"] == 99.0


def test_a_search_is_summed_up(search: Search) -> None:
    failed = changed(finished(8, 1.0), outcome="failed", tokens_per_second=None)
    metrics = search_report(search, [finished(2, 100.0), finished(4, 150.0, memory=GB), failed]).metrics()
    assert metrics["result/speedup_over_control"] == pytest.approx(1.5)
    assert metrics["result/tokens_per_second"] == pytest.approx(150.0)
    assert metrics["memory/process_gb"] == 1.0
    assert (metrics["trials/all"], metrics["trials/ok"], metrics["trials/failed"], metrics["trials/oom"]) == (
        3,
        2,
        1,
        0,
    )
    assert metrics["time/device_seconds"] == 30.0
    assert "result/tokens_per_second" not in search_report(search, [failed]).metrics()


@pytest.mark.usefixtures("working_folder")
def test_pages_of_trials_and_searches_begin_with_few_numbers(search: Search) -> None:
    """Of a trial with every number, and of one that failed, whose reason is in the list."""
    full = dict.fromkeys(("memory", "allocated", "reserved", "predicted_memory"), 2**30)
    full |= dict.fromkeys(("predicted_speed", "mfu", "data_wait_fraction", "val_loss"), 0.5)
    rows = [
        finished(2, 100.0, step_seconds=[0.1] * 3, losses=[5.0] * 3, step_tokens=64, **full),
        changed(
            finished(4, 1.0), outcome="failed", reason="RuntimeError: no kernel", tokens_per_second=None,
            candidate=Candidate(4, (("checkpointing", "full"),)),
        ),
    ]  # fmt: skip
    search.folder.mkdir()
    parent = open_parent(search)
    record = search.record(parent)
    evidence = TrialRuns(record)
    with Tracker(parent) as tracker:
        log_start(tracker, record)
        evidence.fill([replace(row, labels=search.labels(row.candidate)) for row in rows])
        evidence.close()
        publish(search, rows)
        log_result(tracker, search.folder)
    client = MlflowClient(parent.store)
    whole = client.get_run(parent.run_id).data
    trial, failed = (client.search_runs([parent.experiment_id], f"tags.trial = '{row.key}'")[0].data for row in rows)
    for kind, data, names in (("search", whole, SEARCH_METRICS), ("trial", trial, TRIAL_METRICS)):
        first = {name for name in data.metrics if not name.startswith("detail/")}
        assert first <= set(names), kind
        assert len(first) <= MAX_TOP_LEVEL_METRICS, kind
        assert {"detail/result/tokens_per_second_low", "detail/result/tokens_per_second_high"} <= data.metrics.keys()
    assert set(TRIAL_METRICS) <= trial.metrics.keys()
    curve = client.get_metric_history(
        client.search_runs([parent.experiment_id], "tags.trial = 'm2'")[0].info.run_id, "loss/train"
    )
    assert [(point.step, point.value) for point in curve] == [(1, 5.0), (2, 5.0), (3, 5.0)]
    assert failed.tags["reason"] == "RuntimeError: no kernel"
    assert (trial.tags["knobs"], failed.tags["knobs"]) == ("same as control", "checkpointing=full")
    assert (trial.tags["batch"], failed.tags["batch"]) == ("2 x 4", "4 x 2")
    measurements = ("tags.`rank`", *MEASUREMENT_COLUMNS)
    assert [*COLUMNS["tune"]][: len(measurements)] == [*measurements]
    assert sum((*FIRST_WIDTHS["tune"], *(COLUMNS["tune"][column] for column in measurements))) <= 690
    for column in COLUMNS["tune"]:
        kind, _, name = column.partition(".")
        # All trials have the same global batch unless the accumulation is searched, and not all have a reason.
        if column not in ("tags.`global_batch`", "tags.`reason`"):
            assert name.strip("`") in getattr(trial, kind), column
    drawn = {metric for view in VIEWS["tune"] if view.charts for metric in (*view.charts, view.x_metric)}
    assert drawn <= trial.metrics.keys()
    assert whole.params["changed.knobs"] == "checkpointing=selective,full"
    assert whole.params["memory_limit"].endswith(" GB")
    assert "trial_steps" not in whole.params
    assert "changed.trial_steps" not in whole.params


def test_a_store_that_goes_away_between_trials_gets_them_later(
    search: Search,
    mlflow_server: Callable,
    free_port: int,
    working_folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The store has two addresses here: its database, and a server that does not run at first."""
    database, server = f"sqlite:///{working_folder}/server.db", f"http://127.0.0.1:{free_port}"
    shutil.copy(working_folder / "mlflow.db", working_folder / "server.db")
    search.folder.mkdir()
    first, second = (replace(finished(size, 100.0 * size, step_seconds=[0.1] * 3), number=size) for size in (1, 2))

    def request(row: TrialRow) -> TrialRequest:
        return TrialRequest(row.key, row.number, "m1", Proposal(row.candidate, "probe"), ResolvedConfig(), "here")

    parent = open_parent(replace(search, config=replace(search.config, tracking_uri=database)))
    evidence = TrialRuns(search.record(parent))
    evidence.open(request(first))
    evidence.parent = replace(parent, store=server)
    evidence.fill([first])
    evidence.open(request(second))
    assert "The search continues" in " ".join(capfd.readouterr().err.split())
    with mlflow_server(working_folder, free_port):
        evidence.fill([first, second])
        evidence.fill([first, replace(second, outcome="failed")])  # complete: not told again
        evidence.close()
        assert Tracker(evidence.parent).flush()
        client = MlflowClient(server)
        mlflow_runs = client.search_runs([parent.experiment_id], "tags.kind = 'trial'")
        assert sorted(run.data.tags["trial"] for run in mlflow_runs) == ["m1", "m2"]
        assert {run.info.status for run in mlflow_runs} == {"FINISHED"}
        assert {run.data.metrics["result/tokens_per_second"] for run in mlflow_runs} == {100.0, 200.0}
        assert {run.data.params["checkpointing"] for run in mlflow_runs} == {"none"}


def test_every_measurement_of_a_trial_is_a_metric_in_the_unit_of_its_name(
    search: Search, distinct: Callable[..., Any]
) -> None:
    """Each by itself, so that one in the place of another shows."""
    row = distinct(TrialRow, candidate=Candidate(2, (("checkpointing", "none"),)), noise_scale=Estimate(1.5, 1.0, 2.0))
    result, speed, memory = row.result, row.result.throughput, row.result.memory
    assert trial_report(search.record(RunRef("", "", "", "/one")), row).metrics() == {
        "result/tokens_per_second": speed.tokens_per_second, "result/tokens_per_second_low": speed.low,
        "result/tokens_per_second_high": speed.high, "result/mfu": result.mfu, "loss/val": result.val_loss,
        "memory/process_gb": memory.process / 1e9, "memory/allocated_gb": memory.allocated / 1e9,
        "memory/reserved_gb": memory.reserved / 1e9, "memory/allocator_retries": memory.allocator_retries,
        "memory/predicted_gb": row.predicted_memory / 1e9, "prediction/tokens_per_second": row.predicted_speed,
        "time/trial_seconds": row.seconds, "time/compile_seconds": row.compile_seconds,
        "time/data_wait_fraction": result.data_wait_fraction, "learning/noise_scale": row.noise_scale.middle,
    }  # fmt: skip


@pytest.mark.usefixtures("working_folder")
def test_what_the_store_lacks_of_a_search_is_sent_by_the_next_one(search: Search) -> None:
    """Of one that finished while the store was away: its trial, its settings, its result and its files."""
    search.folder.mkdir()
    parent = open_parent(search)
    row = replace(finished(2, 100.0, step_seconds=[0.1] * 3), labels={"knobs": "same as control"})
    pending = TrialRequest("m8", 2, "m8", Proposal(Candidate(8), "probe"), ResolvedConfig(), "here")
    TrialRuns(search.record(parent)).open(pending)
    search.trials.mkdir()
    write_row(search.trials, row)
    publish(search, [row])
    later, last = (replace(search, directory=search.directory.parent / name) for name in ("two", "three"))
    later.folder.mkdir()
    last.folder.mkdir()
    orphaned_runs.open_run_dirs.clear()  # as if its process had ended
    record = later.record(open_parent(later))
    complete_orphaned_experiments(record)
    client = MlflowClient(parent.store)
    whole = client.get_run(parent.run_id)
    assert (whole.info.status, whole.data.tags["fully_logged"]) == ("FINISHED", "true")
    assert whole.data.params["changed.knobs"] == "checkpointing=selective,full"
    assert whole.data.metrics["result/tokens_per_second"] == pytest.approx(100.0)
    assert whole.data.tags["mlflow.note.content"] == (search.folder / "summary.md").read_text()
    assert "trials.csv" in {file.path for file in client.list_artifacts(parent.run_id)}
    trials = client.search_runs([parent.experiment_id], f"tags.`mlflow.parentRunId` = '{parent.run_id}'")
    states = {run.data.tags["trial"]: (run.info.status, run.data.tags.get("knobs")) for run in trials}
    assert states == {"m2": ("FINISHED", "same as control"), "m8": ("KILLED", None)}
    assert client.get_run(record.mlflow_run.run_id).info.status == "RUNNING"
    orphaned_runs.open_run_dirs.clear()
    open_parent(last)
    incomplete = [run.run_id for run in orphaned_runs.incomplete_runs]
    assert incomplete == [record.mlflow_run.run_id], "the others are complete"
