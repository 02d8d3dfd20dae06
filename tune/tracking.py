"""A search or a ladder in MLflow: one parent, and one child per trial, both opened and closed by the driver.

A child is found again by its trial's key: whatever was killed, a trial has one child, and one that lacks something is
completed from the trial's row. A store that goes away between two trials stops neither: the rows on disk are what is
complete.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest

from infra import provenance
from infra.console import errors
from infra.errors import UserError
from infra.table import facts
from infra.tracking.key import RunKey
from infra.tracking.names import shown
from infra.tracking.store import children, create_run, reopen_run
from infra.tracking.tracker import Tracker
from infra.units import GB
from pipeline.shards import made_by
from tune import folder
from tune.experiment import Experiment
from tune.trial.row import TrialRow, flat_row
from tune.trial.run import Request

TRIAL_METRICS = (
    "result/tokens_per_second", "result/mfu", "memory/process_gb", "prediction/tokens_per_second",
    "prediction/memory_gb", "time/trial_seconds", "time/compile_seconds", "loss/val", "time/step_seconds",
    "loss/train", "progress/train_tokens",
)  # fmt: skip
"""The numbers of a trial's page in MLflow; its other metrics are under ``detail/``."""


class ExperimentRecorder:
    """The parent run of one experiment, and its children."""

    def __init__(self, experiment: Experiment, parent: RunKey) -> None:
        self.experiment = experiment
        self.parent = parent
        found = children(parent, "trial") if experiment.config.resume else {}
        self.children = {trial: child for trial, (child, _) in found.items()}
        """By their trial's key."""
        self.complete = {trial for trial, (_, complete) in found.items() if complete}
        """Keys of trials whose child has ended and has, or will have, all its entries."""
        self.running: set[str] = set()
        """Keys of trials that are running."""
        self.sending: list[Tracker] = []
        """Of the children of trials that have ended."""

    def describe(self, tracker: Tracker) -> None:
        """Record the parent's settings and data; of a resumed one, its params stay, as they cannot change."""
        experiment = self.experiment
        if not experiment.config.resume:
            tracker.params(experiment.params())
        tracker.json(experiment.identity(), f"{experiment.config.kind}.json")
        self._data(tracker)

    def start(self, request: Request) -> None:
        """Open the child of a trial that is about to start, unless a killed driver opened it already."""
        with self._patience():
            if request.key in self.children:
                reopen_run(self.children[request.key])
                self.complete.discard(request.key)
            else:
                self._child(request.key, f"{request.number:03d} {request.name}", request.proposal.stage)
            self.running.add(request.key)

    def close(self) -> None:
        """Close the children of trials that are running, which will be opened again on resume, and wait for all."""
        for trial in self.running:
            tracker = Tracker(self.children[trial])
            tracker.finish("KILLED", wait=False)
            self.sending.append(tracker)
        all(tracker.deliver() for tracker in self.sending)  # where one is given up, the others are too

    def catch_up(self, rows: Sequence[TrialRow]) -> None:
        """Complete the children of all trials that have ended, also of those that did so without driver or store."""
        with self._patience():
            for row in rows:
                if row.key not in self.complete:
                    self._complete(row)
                    self.complete.add(row.key)
                    self.running.discard(row.key)

    def _complete(self, row: TrialRow) -> None:
        """Fill a trial's child from its row, and close it. Raises ``UserError`` when it cannot be created now."""
        tracker = Tracker(self._child(row.key, f"{row.number:03d} {row.name}", row.stage))
        tracker.params(
            {"micro_batch": row.candidate.micro_batch, "accumulation": row.accumulation}
            | dict(row.candidate.knobs)
            | {"stage": row.stage, "round": row.round}
        )
        tracker.metrics(shown(metrics(row), TRIAL_METRICS))  # at step 0, as train.tracking does
        for step, (seconds, loss) in enumerate(zip_longest(row.step_seconds, row.losses), 1):
            seen = {"progress/train_tokens": row.step_tokens * step}
            tracker.metrics({"time/step_seconds": seconds, "loss/train": loss} | seen, step)
        self._data(tracker)
        tracker.json(flat_row(row), "trial.json")
        words = self.experiment.words(row) | {"node": row.node}
        expected = f", predicted {words['predicted memory']}" if row.predicted_memory else ""
        tracker.note(facts([
            ("What", f"{row.stage} of {row.name}; trial {row.number} of {self.experiment.place.name}"),
            ("Tokens/s", words.get("tokens/s", "none was measured")),
            ("Memory", words.get("memory", "not measured") + expected),
            ("Outcome", f"{row.outcome}: {row.reason}"),
        ]))  # fmt: skip
        tracker.tags({"outcome": row.outcome, "reason": row.reason} | words)
        tracker.finish("FAILED" if row.outcome == "failed" else "FINISHED", wait=False)
        self.sending.append(tracker)

    def _data(self, tracker: Tracker) -> None:
        data, manifest = self.experiment.data, self.experiment.manifest
        tracker.data(data.name, manifest.fingerprint, str(data), manifest.splits, "training")
        maker = made_by(data)
        tracker.tags({"data.run": maker.run_id} if maker else {})

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """Continue where the store does not answer: the next trial's end, or a resumed search, makes up for it."""
        try:
            yield
        except UserError as failure:
            errors.print(
                f"{failure} The {self.experiment.config.kind} continues; MLflow gets this trial when it answers again."
            )

    def _child(self, key: str, name: str, stage: str) -> RunKey:
        """The child of the trial ``key``, which is created if there is none."""
        if key not in self.children:
            tags = {"kind": "trial", "trial": key, "stage": stage}
            self.children[key] = create_run(self.experiment.collection, name, parent=self.parent, tags=tags)
        return self.children[key]


def metrics(row: TrialRow) -> dict[str, float | int | None]:
    return {
        "result/tokens_per_second": row.tokens_per_second,
        "result/tokens_per_second_low": row.low,
        "result/tokens_per_second_high": row.high,
        "result/mfu": row.mfu,
        "prediction/tokens_per_second": row.predicted_speed,
        "prediction/memory_gb": row.predicted_memory and row.predicted_memory / GB,
        "memory/process_gb": row.memory and row.memory / GB,
        "memory/allocated_gb": row.allocated and row.allocated / GB,
        "memory/reserved_gb": row.reserved and row.reserved / GB,
        "memory/allocator_retries": row.allocator_retries,
        "time/trial_seconds": row.seconds,
        "time/compile_seconds": row.compile_seconds,
        "time/data_wait_fraction": row.data_wait_fraction,
        "loss/val": row.val_loss,
    }


def open_parent(experiment: Experiment) -> RunKey:
    """The parent run of a new experiment, whose folder keeps its key."""
    return create_run(
        experiment.collection, experiment.place.name, tracking_uri=experiment.config.tracking_uri,
        home=experiment.place.address, tags=provenance.collect() | {"kind": experiment.config.kind},
        keep=partial(folder.begin, experiment.working_copy, experiment.config, experiment.identity()),
    )  # fmt: skip
