"""A search or a ladder in MLflow: one parent run, and one child run per trial, opened and closed by the driver.

A child run is identified by its trial's key, so that a trial has only one, even if processes are killed. An incomplete
child run is completed from the trial's row. An outage of MLflow stops no trial, because the rows on disk are complete.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path

from infra.cli.console import errors
from infra.cli.table import Report
from infra.cli.units import GB, format_duration
from infra.device import provenance
from infra.errors import UserError
from infra.facts import Fact
from infra.storage.directory import StorageDir
from infra.storage.workspace import Workspace
from infra.tracking.names import group_under_detail
from infra.tracking.orphaned_runs import incomplete_runs, is_complete, lock_run_dir
from infra.tracking.run_ref import RunRef
from infra.tracking.saved_views import tag_ranks
from infra.tracking.store import create_child_run, create_run, find_children, read_logged, reopen_run
from infra.tracking.tracker import Tracker
from train.reporting.report import allocator_facts, memory_fact, speed_fact
from tune.experiment.folder import (
    RESULT,
    SUMMARY,
    TRIALS,
    ExperimentRecord,
    ExperimentResult,
    read_record,
    read_result,
    write_record,
)
from tune.experiment.trials import Experiment
from tune.trial.row import TrialRow, flatten_row, read_rows
from tune.trial.run import TrialRequest

TRIAL_METRICS = (
    "result/tokens_per_second", "result/mfu", "prediction/tokens_per_second", "memory/predicted_gb",
    "memory/process_gb", "time/trial_seconds", "time/compile_seconds", "loss/val", "time/step_seconds", "loss/train",
    "progress/train_tokens",
)  # fmt: skip
"""Metrics at the top level of a trial's page in MLflow; its other metrics are under ``detail/``."""


class TrialRuns:
    """The child runs of an experiment's trials in MLflow, which are filled from the trials' rows."""

    def __init__(self, record: ExperimentRecord, *, resumed: bool = False) -> None:
        """Find the existing child runs of the experiment of ``record`` if it is ``resumed``."""
        self.record, self.parent = record, record.mlflow_run
        existing = find_children(self.parent, "trial") if resumed else {}
        self._refs = {trial: child for trial, (child, _) in existing.items()}
        """References to the child runs, by the trial's key."""
        self._filled = {trial for trial, (_, is_complete) in existing.items() if is_complete}
        """Keys of trials whose child run has ended; all its entries are sent or queued."""
        self._unfilled = self._refs.keys() - self._filled
        """Keys of trials whose child run is open, or was closed without a row."""

    def open(self, request: TrialRequest) -> None:
        """Open the child run of a trial that is about to start, or reopen a child run that a killed driver opened."""
        with self._continue_without_store():
            if request.key in self._refs:
                reopen_run(self._refs[request.key])
                self._filled.discard(request.key)
            else:
                self._child(request.key, f"{request.number:03d} {request.name}", request.proposal.stage)
            self._unfilled.add(request.key)

    def fill(self, rows: Sequence[TrialRow]) -> None:
        """Fill and close the child runs of all ended trials, including those that ended during an outage of MLflow."""
        with self._continue_without_store():
            for row in rows:
                if row.key not in self._filled:
                    child = self._child(row.key, f"{row.number:03d} {row.name}", row.stage)
                    fill_trial(Tracker(child), self.record, row)
                    self._filled.add(row.key)
                    self._unfilled.discard(row.key)

    def close(self) -> None:
        """Close the child runs of trials without a row, which are reopened when the experiment is resumed."""
        for trial in self._unfilled:
            Tracker(self._refs[trial]).finish("KILLED", wait=False)

    @contextmanager
    def _continue_without_store(self) -> Iterator[None]:
        """Continue if MLflow does not respond; the entries of a trial are sent after the next one, or on resume."""
        try:
            yield
        except UserError as failure:
            errors.print(
                f"{failure} The {self.record.kind} continues. The entries of this trial are sent once MLflow responds "
                "again."
            )

    def _child(self, key: str, name: str, stage: str) -> RunRef:
        """Return the child run of the trial ``key``, which is created if there is none. Raises ``UserError``."""
        if key not in self._refs:
            tags = {"kind": "trial", "trial": key, "stage": stage}
            self._refs[key] = create_child_run(self.parent, self.record.mlflow_experiment, name, tags)
        return self._refs[key]


def fill_trial(tracker: Tracker, record: ExperimentRecord, row: TrialRow) -> None:
    """Log the values in the ``row`` of a trial, and close its run."""
    tracker.log_params(
        {"micro_batch": row.candidate.micro_batch, "accumulation": row.accumulation}
        | dict(row.candidate.knobs)
        | {"stage": row.stage, "round": row.round}
    )
    report = trial_report(record, row)
    tracker.log_metrics(group_under_detail(report.metrics(), TRIAL_METRICS))  # Results are at step 0, as for a run.
    for step, (seconds, loss) in enumerate(zip_longest(row.step_seconds, row.losses), 1):
        progress = {"progress/train_tokens": row.step_tokens * step}
        tracker.log_metrics({"time/step_seconds": seconds, "loss/train": loss} | progress, step)
    step = 0
    for rung in row.rungs:  # The step is the time, so that MLflow's charts show losses by time.
        step = max(step + 1, round(rung.seconds))
        losses = {"loss/val_by_time": rung.loss, "progress/run_seconds": rung.seconds}
        tracker.log_metrics(losses, step)
    log_data(tracker, record)
    tracker.log_json(flatten_row(row), "trial.json")
    tracker.set_description(report.markdown())
    tracker.set_tags({"outcome": row.outcome, "reason": row.reason} | trial_columns(row, record.limit))
    tracker.finish("FAILED" if row.outcome == "failed" else "FINISHED", wait=False)


def trial_columns(row: TrialRow, limit: int | None) -> dict[str, str]:
    """Return the columns of a trial in MLflow's list of runs: batch, other settings, and speed and memory as texts.

    ``limit`` is the memory limit of its process in bytes.
    """
    columns = {"batch": f"{row.candidate.micro_batch} x {row.accumulation}"} | row.labels
    if row.speed:
        columns["tokens/s"] = speed_fact(row.speed)
    if row.memory is not None:
        columns["memory"] = memory_fact(row.memory, limit)
    return columns


def trial_report(record: ExperimentRecord, row: TrialRow) -> Report:
    """Build the report of a trial, which becomes the description and the metrics of its run."""
    result = row.result
    columns = trial_columns(row, record.limit)
    prediction = Fact.of(
        "memory/predicted_gb", row.predicted_memory and row.predicted_memory / GB, "predicted {:.2f} GB"
    )
    attention = result.attention if result else ""
    summary = [
        ("Trial", f"{row.number} of {record.name}: {row.stage}, {row.name}; on {row.node}"),
        ("Tokens/s", columns.get("tokens/s", "not measured")),
        ("Peak memory", Fact.joined(columns.get("memory", "not measured"), prediction)),
        ("Outcome", Fact.joined(f"{row.outcome}: {row.reason}", attention and f"attention {attention}")),
    ]  # fmt: skip
    if row.rungs:
        losses = ", ".join(f"{rung.loss:.3f} after {format_duration(round(rung.seconds, 1))}" for rung in row.rungs)
        summary.insert(1, ("Losses", losses))
    details = [
        Fact.of("result/mfu", result and result.mfu),
        Fact.of("prediction/tokens_per_second", row.predicted_speed),
        *(allocator_facts(result.memory).values() if result else ()),
        Fact.of("memory/allocator_retries", result.memory.allocator_retries if result else 0),
        Fact.of("time/trial_seconds", row.seconds),
        Fact.of("time/compile_seconds", row.compile_seconds),
        Fact.of("time/data_wait_fraction", result and result.data_wait_fraction),
        Fact.of("loss/val", result and result.val_loss),
        Fact.of("learning/noise_scale", row.noise_scale and row.noise_scale.middle),
    ]
    return Report(summary, details=details)


def log_data(tracker: Tracker, record: ExperimentRecord) -> None:
    """Log the data set of an experiment or of one of its trials."""
    data = StorageDir.of(record.data)
    tracker.log_dataset(data.name, record.fingerprint, record.data, record.splits, "training")


def log_start(tracker: Tracker, record: ExperimentRecord) -> None:
    """Log the settings and the data of an experiment."""
    tracker.log_params(record.params)
    tracker.log_json(record.identity, f"{record.kind}.json")
    log_data(tracker, record)


def log_result(tracker: Tracker, folder: Path) -> ExperimentResult | None:
    """Log and return the result of the experiment in the local ``folder``; None if it has not finished."""
    result = read_result(folder)
    if result:
        tracker.set_tags(result.tags)
        if result.trial_tags:
            tag_ranks(tracker.run_ref, result.trial_tags)
        tracker.log_metrics(dict(result.metrics))
        tracker.set_description((folder / SUMMARY).read_text(encoding="utf-8"))
        for name in result.files:
            tracker.log_file(folder / name)
        tracker.status = "FINISHED" if result.has_winner else "FAILED"
    return result


def open_parent(experiment: Experiment) -> RunRef:
    """Create the parent run of a new experiment, and store a record with a reference to it in its folder."""
    return create_run(
        experiment.mlflow_experiment, experiment.directory.name, tracking_uri=experiment.config.tracking_uri,
        run_dir=experiment.directory.address, tags=provenance.collect_tags() | {"kind": experiment.config.kind},
        keep=lambda mlflow_run: write_record(experiment.workspace, experiment.record(mlflow_run)),
    )  # fmt: skip


def complete_orphaned_experiments(record: ExperimentRecord) -> None:
    """Send the missing entries of ended experiments of this machine that are of the same kind as ``record``.

    Stops at the first experiment whose entries cannot be sent. Never raises an exception.
    """
    with suppress(Exception):
        for orphan in incomplete_runs:
            is_other = orphan.run_dir != record.mlflow_run.run_dir
            if is_other and orphan.experiment_id == record.mlflow_run.experiment_id:
                with suppress(UserError), lock_run_dir(orphan):
                    if not is_complete(orphan) and not _complete_experiment(orphan, record.kind):
                        return


def _complete_experiment(orphan: RunRef, kind: str) -> bool:
    """Fill the runs of an ended experiment, one of which is ``orphan``, from its folder, and close them.

    Returns whether all entries were sent to MLflow.
    """
    directory = StorageDir.of(orphan.run_dir)
    record, folder = read_record(directory, kind), Workspace.of(directory).path
    trial_runs = TrialRuns(record, resumed=True)
    trial_runs.fill(read_rows(folder / TRIALS))
    trial_runs.close()
    tracker = Tracker(record.mlflow_run, read_logged(record.mlflow_run))
    log_start(tracker, record)
    if log_result(tracker, folder) is None:
        tracker.status = "KILLED"
    files = [folder / f"{kind}.json", folder / RESULT, *(folder / TRIALS).glob("*.json")]
    end_time = max(file.stat().st_mtime for file in files if file.exists())
    tracker.finish(tracker.status, ended=end_time, wait=False)
    if not tracker.wait_until_sent():
        return False
    if not is_complete(orphan):  # The folder belongs to a new experiment by now.
        Tracker(orphan).finish("KILLED", wait=False)
    return True
