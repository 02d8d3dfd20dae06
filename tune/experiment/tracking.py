"""A search or a ladder in MLflow: one parent run, and one child run per trial, opened and closed by the driver.

A child run is identified by its trial's key, so a trial has only one, whichever process is killed, and an incomplete
one is completed from the trial's row. An outage of MLflow stops no trial, because the rows on disk are complete.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest

from infra.cli.console import errors
from infra.cli.table import summary
from infra.cli.units import GB
from infra.device import provenance
from infra.errors import UserError
from infra.tracking.names import group_under_detail
from infra.tracking.run_ref import RunRef
from infra.tracking.store import children, create_run, reopen_run
from infra.tracking.tracker import Tracker
from pipeline.shards import producing_run
from tune.experiment import folder
from tune.experiment.trials import Experiment
from tune.trial.row import TrialRow, flatten_row
from tune.trial.run import TrialRequest

TRIAL_METRICS = (
    "result/tokens_per_second", "result/mfu", "memory/process_gb", "prediction/tokens_per_second",
    "memory/predicted_gb", "time/trial_seconds", "time/compile_seconds", "loss/val", "time/step_seconds",
    "loss/train", "progress/train_tokens",
)  # fmt: skip
"""Metrics at the top level of a trial's page in MLflow; its other metrics are under ``detail/``."""


class ExperimentRecorder:
    """Records an experiment and its trials in MLflow."""

    def __init__(self, experiment: Experiment, parent: RunRef) -> None:
        self.experiment = experiment
        self.parent = parent
        existing = children(parent, "trial") if experiment.config.resume else {}
        self.children = {trial: child for trial, (child, _) in existing.items()}
        """Child runs by the trial's key."""
        self.complete = {trial for trial, (_, complete) in existing.items() if complete}
        """Keys of trials whose child run has ended; all its entries are sent or queued."""
        self.running: set[str] = set()
        """Keys of running trials."""
        self.sending: list[Tracker] = []
        """Trackers of ended trials, which may still be sending entries."""

    def describe(self, tracker: Tracker) -> None:
        """Record the parent's settings and data. The params of a resumed experiment are not set again."""
        experiment = self.experiment
        if not experiment.config.resume:
            tracker.log_params(experiment.params())
        tracker.log_json(experiment.identity(), f"{experiment.config.kind}.json")
        self._data(tracker)

    def start(self, request: TrialRequest) -> None:
        """Open the child run of a trial that is about to start, or reopen the one that a killed driver opened."""
        with self._patience():
            if request.key in self.children:
                reopen_run(self.children[request.key])
                self.complete.discard(request.key)
            else:
                self._child(request.key, f"{request.number:03d} {request.name}", request.proposal.stage)
            self.running.add(request.key)

    def close(self) -> None:
        """Close the child runs of running trials, which are reopened on resume, and wait until all entries are sent."""
        for trial in self.running:
            tracker = Tracker(self.children[trial])
            tracker.finish("KILLED", wait=False)
            self.sending.append(tracker)
        all(
            tracker.wait_until_sent() for tracker in self.sending
        )  # After one times out, the others are not waited for.

    def catch_up(self, rows: Sequence[TrialRow]) -> None:
        """Complete the child runs of all ended trials, including those that ended without the driver or MLflow."""
        with self._patience():
            for row in rows:
                if row.key not in self.complete:
                    self._complete(row)
                    self.complete.add(row.key)
                    self.running.discard(row.key)

    def _complete(self, row: TrialRow) -> None:
        """Fill a trial's child run from its row, and close it. Raises ``UserError`` if it cannot be created now."""
        tracker = Tracker(self._child(row.key, f"{row.number:03d} {row.name}", row.stage))
        tracker.log_params(
            {"micro_batch": row.candidate.micro_batch, "accumulation": row.accumulation}
            | dict(row.candidate.knobs)
            | {"stage": row.stage, "round": row.round}
        )
        tracker.log_metrics(
            group_under_detail(metrics(row), TRIAL_METRICS)
        )  # Step 0 holds results, as in train.reporting.tracking.
        for step, (seconds, loss) in enumerate(zip_longest(row.step_seconds, row.losses), 1):
            progress = {"progress/train_tokens": row.step_tokens * step}
            tracker.log_metrics({"time/step_seconds": seconds, "loss/train": loss} | progress, step)
        self._data(tracker)
        tracker.log_json(flatten_row(row), "trial.json")
        columns = self.experiment.trial_columns(row) | {"node": row.node}
        predicted = f"; predicted {columns['predicted memory']}" if row.predicted_memory else ""
        tracker.set_description(summary([
            ("Trial", f"{row.number} of {self.experiment.directory.name}: {row.stage}, {row.name}"),
            ("Tokens/s", columns.get("tokens/s", "not measured")),
            ("Peak memory", columns.get("memory", "not measured") + predicted),
            ("Outcome", f"{row.outcome}: {row.reason}"),
        ]))  # fmt: skip
        tracker.set_tags({"outcome": row.outcome, "reason": row.reason} | columns)
        tracker.finish("FAILED" if row.outcome == "failed" else "FINISHED", wait=False)
        self.sending.append(tracker)

    def _data(self, tracker: Tracker) -> None:
        data, manifest = self.experiment.data, self.experiment.manifest
        tracker.log_dataset(data.name, manifest.fingerprint, str(data), manifest.splits, "training")
        maker = producing_run(data)
        tracker.set_tags({"data.run": maker.run_id} if maker else {})

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
        """The child run of the trial ``key``; creates it if there is none."""
        if key not in self.children:
            tags = {"kind": "trial", "trial": key, "stage": stage}
            self.children[key] = create_run(self.experiment.mlflow_experiment, name, parent=self.parent, tags=tags)
        return self.children[key]


def metrics(row: TrialRow) -> dict[str, float | int | None]:
    """The metrics of a trial's result."""
    result, speed = row.result, row.speed
    memory = result and result.memory
    return {
        "result/tokens_per_second": speed and speed.middle,
        "result/tokens_per_second_low": speed and speed.low,
        "result/tokens_per_second_high": speed and speed.high,
        "result/mfu": result and result.mfu,
        "prediction/tokens_per_second": row.predicted_speed,
        "memory/predicted_gb": row.predicted_memory and row.predicted_memory / GB,
        "memory/process_gb": memory and memory.process / GB,
        "memory/allocated_gb": memory and memory.allocated and memory.allocated / GB,
        "memory/reserved_gb": memory and memory.reserved and memory.reserved / GB,
        "memory/allocator_retries": memory.allocator_retries if memory else 0,
        "time/trial_seconds": row.seconds,
        "time/compile_seconds": row.compile_seconds,
        "time/data_wait_fraction": result and result.data_wait_fraction,
        "loss/val": result and result.val_loss,
    }


def open_parent(experiment: Experiment) -> RunRef:
    """Create the parent run of a new experiment, and store a reference to it in the experiment's folder."""
    return create_run(
        experiment.mlflow_experiment, experiment.directory.name, tracking_uri=experiment.config.tracking_uri,
        run_dir=experiment.directory.address, tags=provenance.collect() | {"kind": experiment.config.kind},
        keep=partial(folder.write_record, experiment.workspace, experiment.config, experiment.identity()),
    )  # fmt: skip
