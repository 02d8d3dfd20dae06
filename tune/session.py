"""An experiment from its beginning to its end: run trials, record them, and say what was found."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from infra.cluster import connected
from infra.command import INTERRUPTED
from infra.console import console
from infra.errors import UserError
from infra.progress import doing
from infra.tracking.store import open_store
from infra.tracking.tracker import Tracker
from infra.tracking.views import ui_link
from infra.units import GB, format_duration
from train.checkpoint.run_folder import resume_command
from tune import folder as folders
from tune.device import trial_nodes
from tune.experiment import Experiment
from tune.ray_tune import Listener, Proposals, drive
from tune.tracking import ExperimentRecorder, open_parent
from tune.trial.row import TrialRow, read_rows
from tune.trial.run import Request

Publish = Callable[[Sequence[TrialRow], Tracker], bool]
"""Prints, writes and records what was found; returns whether there is a winner."""

Kind = TypeVar("Kind", bound=Experiment)


def conduct(experiment: Kind, publish: Callable[[Kind, Sequence[TrialRow], Tracker], bool]) -> int:
    """Run, record and ``publish`` ``experiment``; returns the exit code."""
    open_store(experiment.config.tracking_uri)  # one that cannot be used is refused before anything is made
    with folders.locked(experiment.place, experiment.kind) as copy:
        experiment = replace(experiment, copy=copy)
        session = Session(experiment, partial(publish, experiment))
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
    publish: Publish

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
            won = self.publish(rows, tracker)
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
            console.print(line(experiment, row), markup=False)
            console.print(progress(experiment, rows), markup=False)

        running: dict[str, str] = {}
        # Where Ctrl-C falls elsewhere, the rows say as well where to continue.
        with suppress(KeyboardInterrupt), connected(experiment.config.address):
            resources = experiment.resources()
            with doing("starting trials") as shown:
                drive(Proposals(experiment, Listener(started, ended), partial(trial_nodes, resources)), resources)


def line(experiment: Experiment, row: TrialRow) -> str:
    """A finished trial as one line."""
    limit = f" of {experiment.limit / GB:.2f}" if experiment.limit else ""
    validation = "" if row.val_loss is None else f"/{row.val_loss:.3f}"
    told = [
        f"{row.number:3d} {experiment.named(row)}",
        f"{row.speed.middle:,.0f} ± {row.speed.width / 2:.1%} tokens/s" if row.speed else "no speed",
        "" if row.memory is None else f"{row.memory / GB:.2f}{limit} GB",
        "" if row.mfu is None else f"MFU {row.mfu:.1%}",
        "" if row.compile_seconds is None else f"compile {row.compile_seconds:.1f} s",
        "" if row.train_loss is None else f"loss {row.train_loss:.3f}{validation}",
        f"on {row.node}" if experiment.config.cluster else "",
        f"{row.outcome}: {row.reason}",
    ]
    return " | ".join(filter(None, told))


def progress(experiment: Experiment, rows: Sequence[TrialRow]) -> str:
    """The best so far, what was spent, and about what is left."""
    spent = sum(row.seconds for row in rows)
    left = spent / len(rows) * experiment.remaining(rows) / experiment.parallel
    times = f"spent {format_duration(round(spent))} | about {format_duration(round(left))} left"
    return f"    {experiment.best(rows)}{times}"
