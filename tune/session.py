"""An experiment from its beginning to its end: run trials, record them, and say what was found."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from infra.cluster import connected
from infra.command import INTERRUPTED
from infra.console import console
from infra.errors import UserError
from infra.progress import doing
from infra.tracking.store import open_store
from infra.tracking.tracker import Tracker
from infra.tracking.views import ui_link
from train.checkpoint.run_folder import resume_command
from tune import folder as folders
from tune.device import trial_nodes
from tune.experiment import Experiment
from tune.ray_tune import Listener, Proposals, drive
from tune.tracking import ExperimentRecorder, open_parent
from tune.trial.row import TrialRow, read_rows
from tune.trial.run import Request


class Report(Protocol):
    """What is said of an experiment."""

    def line(self, row: TrialRow) -> str:
        """A finished trial as one line."""
        ...

    def progress(self, rows: Sequence[TrialRow]) -> str:
        """What was spent, and what is left."""
        ...

    def publish(self, rows: Sequence[TrialRow], tracker: Tracker) -> bool:
        """Print, write and record what was found; returns whether there is a winner."""
        ...


Kind = TypeVar("Kind", bound=Experiment)


def conduct(experiment: Kind, reported: Callable[[Kind], Report]) -> int:
    """Run, record and report ``experiment``; returns the exit code. Raises ``UserError``.

    ``reported`` makes its report, once its folder on this machine is known.
    """
    open_store(experiment.config.tracking_uri)  # one that cannot be used is refused before anything is made
    with folders.locked(experiment.place, experiment.kind) as copy:
        experiment = replace(experiment, copy=copy)
        session = Session(experiment, reported(experiment))
        try:
            return session.run()
        except UserError:
            if not (experiment.config.resume or session.has_begun()):
                copy.discard()  # its name is free for the corrected command
            raise


@dataclass(frozen=True)
class Session:
    """An experiment that is run, in its folder, which this process has locked."""

    experiment: Experiment
    report: Report

    def run(self) -> int:
        """Run trials until there are no more, and publish what was found; returns the exit code."""
        experiment = self.experiment
        kept = self._kept()  # damaged rows are refused before MLflow hears of it
        kind, resumed = experiment.kind, experiment.config.resume
        identity = experiment.identity()
        parent = folders.resumed_parent(experiment.place, kind, identity) if resumed else open_parent(experiment)
        evidence = ExperimentRecorder(experiment, parent)
        if resumed:
            console.print(f"{len(kept)} trial{'s' * (len(kept) != 1)} kept")
        with Tracker(parent) as tracker:
            evidence.describe(tracker)
            try:
                evidence.catch_up(kept)
                if not experiment.is_finished(kept):
                    self._drive(evidence)
                rows = read_rows(experiment.trials)
                evidence.catch_up(rows)
            finally:
                evidence.close()
            if not experiment.is_finished(rows):
                again = resume_command(f"tune.{kind}", experiment.place)
                console.print(f"stopped; continue with: {again}", markup=False)
                tracker.status = "KILLED"
                return INTERRUPTED
            won = self.report.publish(rows, tracker)
            tracker.status = "FINISHED" if won else "FAILED"
        console.print(ui_link(parent, children=True), markup=False)
        return 0 if won else 1

    def _kept(self) -> list[TrialRow]:
        """The rows that count; those of trials that will run again are removed."""
        experiment, rows = self.experiment, read_rows(self.experiment.trials)
        for row in rows:
            if not experiment.is_kept(row):
                (experiment.trials / f"{row.key}.json").unlink()
        return list(filter(experiment.is_kept, rows))

    def has_begun(self) -> bool:
        """Whether a trial has trained, or has left the traceback of a failure."""
        trials = self.experiment.trials
        return any(row.step_seconds for row in read_rows(trials)) or any(trials.glob("*.txt"))

    def _drive(self, evidence: ExperimentRecorder) -> None:
        """Run trials until there are no more, or until Ctrl-C: Tune takes it between two of its events."""
        experiment = self.experiment

        def started(request: Request) -> None:
            evidence.start(request)
            running[request.key] = f"trial {request.number}, {request.proposal.stage}: {request.name}"
            shown.now("; ".join(running.values()))

        def ended(row: TrialRow, rows: Sequence[TrialRow]) -> None:
            running.pop(row.key, None)
            shown.now("; ".join(running.values()) or "deciding on the next trial")
            evidence.catch_up(rows)
            console.print(self.report.line(row), markup=False)
            console.print(self.report.progress(rows), markup=False)

        running: dict[str, str] = {}
        # Where Ctrl-C falls elsewhere, the rows say as well where to continue.
        with suppress(KeyboardInterrupt), connected(experiment.config.address):
            resources = experiment.resources()
            with doing("starting trials") as shown:
                drive(Proposals(experiment, Listener(started, ended), partial(trial_nodes, resources)), resources)
