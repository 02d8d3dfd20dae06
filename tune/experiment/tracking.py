"""A search or a ladder in MLflow: one parent run, and one child run per trial, opened and closed by the driver.

A child run is identified by its trial's key, so a trial has only one, whichever process is killed, and an incomplete
one is completed from the trial's row. An outage of MLflow stops no trial, because the rows on disk are complete.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest

from infra.cli.console import errors
from infra.cli.table import Report
from infra.device import provenance
from infra.errors import UserError
from infra.facts import Fact
from infra.tracking.names import group_under_detail
from infra.tracking.run_ref import RunRef
from infra.tracking.store import children, create_run, reopen_run
from infra.tracking.tracker import Tracker
from pipeline.shards import producing_run
from train.reporting.report import allocator_facts
from tune.experiment import folder
from tune.experiment.trials import Experiment
from tune.trial.row import TrialRow, flatten_row
from tune.trial.run import TrialRequest

TRIAL_METRICS = (
    "result/tokens_per_second", "result/mfu", "prediction/tokens_per_second", "memory/predicted_gb",
    "memory/process_gb", "time/trial_seconds", "time/compile_seconds", "loss/val", "time/step_seconds", "loss/train",
    "progress/train_tokens",
)  # fmt: skip
"""Metrics at the top level of a trial's page in MLflow; its other metrics are under ``detail/``."""


class TrialRuns:
    """The child runs of an experiment's trials in MLflow, which are filled from the trials' rows."""

    def __init__(self, experiment: Experiment, parent: RunRef) -> None:
        self.experiment, self.parent = experiment, parent
        existing = children(parent, "trial") if experiment.config.resume else {}
        self._refs = {trial: child for trial, (child, _) in existing.items()}
        """Child runs by the trial's key."""
        self._filled = {trial for trial, (_, is_complete) in existing.items() if is_complete}
        """Keys of trials whose child run has ended; all its entries are sent or queued."""
        self._running: set[str] = set()

    def open(self, request: TrialRequest) -> None:
        """Open the child run of a trial that is about to start, or reopen the one that a killed driver opened."""
        with self._patience():
            if request.key in self._refs:
                reopen_run(self._refs[request.key])
                self._filled.discard(request.key)
            else:
                self._child(request.key, f"{request.number:03d} {request.name}", request.proposal.stage)
            self._running.add(request.key)

    def fill(self, rows: Sequence[TrialRow]) -> None:
        """Fill and close the child runs of all ended trials, including those that ended without the driver or
        MLflow."""
        with self._patience():
            for row in rows:
                if row.key not in self._filled:
                    child = self._child(row.key, f"{row.number:03d} {row.name}", row.stage)
                    fill_trial(Tracker(child), self.experiment, row)
                    self._filled.add(row.key)
                    self._running.discard(row.key)

    def close(self) -> None:
        """Close the child runs of running trials, which are reopened on resume."""
        for trial in self._running:
            Tracker(self._refs[trial]).finish("KILLED", wait=False)

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """Continue if MLflow does not respond; the trial is sent when the next one ends or the experiment resumes."""
        try:
            yield
        except UserError as failure:
            errors.print(
                f"{failure} The {self.experiment.config.kind} continues; this trial is sent once MLflow responds again."
            )

    def _child(self, key: str, name: str, stage: str) -> RunRef:
        """The child run of the trial ``key``; creates it if there is none. Raises ``UserError`` if that fails."""
        if key not in self._refs:
            tags = {"kind": "trial", "trial": key, "stage": stage}
            self._refs[key] = create_run(self.experiment.mlflow_experiment, name, parent=self.parent, tags=tags)
        return self._refs[key]


def fill_trial(tracker: Tracker, experiment: Experiment, row: TrialRow) -> None:
    """Log all that the ``row`` of a trial has, and close its run."""
    tracker.log_params(
        {"micro_batch": row.candidate.micro_batch, "accumulation": row.accumulation}
        | dict(row.candidate.knobs)
        | {"stage": row.stage, "round": row.round}
    )
    report = trial_report(experiment, row)
    tracker.log_metrics(group_under_detail(report.metrics(), TRIAL_METRICS))  # Step 0 has results, as of a run.
    for step, (seconds, loss) in enumerate(zip_longest(row.step_seconds, row.losses), 1):
        progress = {"progress/train_tokens": row.step_tokens * step}
        tracker.log_metrics({"time/step_seconds": seconds, "loss/train": loss} | progress, step)
    log_data(tracker, experiment)
    tracker.log_json(flatten_row(row), "trial.json")
    tracker.set_description(report.markdown())
    columns = experiment.trial_columns(row) | {"node": row.node}
    tracker.set_tags({"outcome": row.outcome, "reason": row.reason} | columns)
    tracker.finish("FAILED" if row.outcome == "failed" else "FINISHED", wait=False)


def trial_report(experiment: Experiment, row: TrialRow) -> Report:
    """What a trial measured, as the description and the metrics of its run."""
    result = row.result
    columns = experiment.trial_columns(row)
    prediction = columns.get("predicted_memory", "")
    prediction = Fact.joined("predicted", prediction, separator=" ") if prediction else ""
    summary = [
        ("Trial", f"{row.number} of {experiment.directory.name}: {row.stage}, {row.name}"),
        ("Tokens/s", columns.get("tokens/s", "not measured")),
        ("Peak memory", Fact.joined(columns.get("memory", "not measured"), prediction)),
        ("Outcome", f"{row.outcome}: {row.reason}"),
    ]  # fmt: skip
    details = [
        Fact.of("result/mfu", result and result.mfu),
        Fact.of("prediction/tokens_per_second", row.predicted_speed),
        *(allocator_facts(result.memory).values() if result else ()),
        Fact.of("memory/allocator_retries", result.memory.allocator_retries if result else 0),
        Fact.of("time/trial_seconds", row.seconds),
        Fact.of("time/compile_seconds", row.compile_seconds),
        Fact.of("time/data_wait_fraction", result and result.data_wait_fraction),
        Fact.of("loss/val", result and result.val_loss),
    ]
    return Report(summary, details=details)


def log_data(tracker: Tracker, experiment: Experiment) -> None:
    """Log the data set of an experiment or of one of its trials."""
    data, manifest = experiment.data, experiment.manifest
    tracker.log_dataset(data.name, manifest.fingerprint, str(data), manifest.splits, "training")
    maker = producing_run(data)
    tracker.set_tags({"data.run": maker.run_id} if maker else {})


def log_start(tracker: Tracker, experiment: Experiment) -> None:
    """Log the settings and the data of a new experiment. The params of a resumed one are not set again."""
    if not experiment.config.resume:
        tracker.log_params(experiment.params())
    tracker.log_json(experiment.identity(), f"{experiment.config.kind}.json")
    log_data(tracker, experiment)


def open_parent(experiment: Experiment) -> RunRef:
    """Create the parent run of a new experiment, and store a reference to it in the experiment's folder."""
    return create_run(
        experiment.mlflow_experiment, experiment.directory.name, tracking_uri=experiment.config.tracking_uri,
        run_dir=experiment.directory.address, tags=provenance.collect() | {"kind": experiment.config.kind},
        keep=partial(folder.write_record, experiment.workspace, experiment.config, experiment.identity()),
    )  # fmt: skip
