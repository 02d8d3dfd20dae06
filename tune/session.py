"""An experiment from its beginning to its end: run trials, record them, and say what was found."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from infra.cluster import connected
from infra.command import INTERRUPTED
from infra.console import console
from infra.errors import UserError
from infra.progress import doing
from infra.tracking.store import open_store
from infra.tracking.tracker import Tracker
from infra.tracking.views import ui_link
from infra.units import format_duration
from train.checkpoint.run_folder import resume_command
from tune.config import LadderConfig, SearchConfig
from tune.device import trial_nodes
from tune.experiment import Experiment
from tune.folder import locked, resumed_parent
from tune.ray_tune import Proposals, drive
from tune.tracking import ExperimentRecorder, open_parent
from tune.trial.row import TrialRow, read_rows
from tune.trial.run import Request

Kind = TypeVar("Kind", bound=Experiment)

Publish = Callable[[Kind, Sequence[TrialRow], Tracker], bool]
"""Prints, writes and records what was found; returns whether there is a winner."""


def conduct(
    config: SearchConfig | LadderConfig,
    make: Callable[[Any], Kind],
    introduce: Callable[[Kind], None],
    publish: Publish[Kind],
) -> int:
    """Run the experiment that ``make`` makes of ``config``; returns the exit code.

    ``introduce`` prints what it is and, where nothing else is asked for, what it would run.
    """
    with connected(config.address, code=config.training.model.code) if config.cluster else nullcontext():
        experiment = make(config)
        if config.cluster:
            experiment.resources()  # of a cluster without any, before anything is made
        introduce(experiment)
        if config.dry_run:
            return 0
        open_store(config.tracking_uri)  # one that cannot be used is refused before anything is made
        with locked(experiment.place, experiment.config.kind) as copy:
            experiment = replace(experiment, copy=copy)
            try:
                return _run(experiment, publish)
            except UserError:
                trained = any(row.step_seconds for row in read_rows(experiment.trials))
                if not (config.resume or trained or any(experiment.trials.glob("*.txt"))):  # no traceback either
                    copy.discard()  # its name is free for the corrected command
                raise


def _run(experiment: Kind, publish: Publish[Kind]) -> int:
    """Run trials until there are no more, and publish what was found; returns the exit code."""
    kept = _kept(experiment)  # damaged rows are refused before MLflow hears of it
    kind, resumed = experiment.config.kind, experiment.config.resume
    parent = resumed_parent(experiment.place, kind, experiment.identity()) if resumed else open_parent(experiment)
    recorder = ExperimentRecorder(experiment, parent)
    if resumed:
        console.print(f"{len(kept)} trial{'s' * (len(kept) != 1)} kept")
    with Tracker(parent) as tracker:
        recorder.describe(tracker)
        try:
            recorder.catch_up(kept)
            if not experiment.is_finished(kept):
                _drive(experiment, recorder)
            rows = read_rows(experiment.trials)
            recorder.catch_up(rows)
        finally:
            recorder.close()
        if not experiment.is_finished(rows):
            again = resume_command(f"tune.{kind}", experiment.place)
            console.print(f"stopped; continue with: {again}", markup=False)
            tracker.status = "KILLED"
            return INTERRUPTED
        won = publish(experiment, rows, tracker)
        tracker.status = "FINISHED" if won else "FAILED"
    console.print(ui_link(parent, children=True), markup=False)
    return 0 if won else 1


def _kept(experiment: Experiment) -> list[TrialRow]:
    """The rows that count; those of trials that will run again are removed."""
    rows = read_rows(experiment.trials)
    for row in rows:
        if not experiment.is_kept(row):
            (experiment.trials / f"{row.key}.json").unlink()
    return list(filter(experiment.is_kept, rows))


def _drive(experiment: Experiment, recorder: ExperimentRecorder) -> None:
    """Run trials until there are no more, or until Ctrl-C: Tune takes it between two of its events."""

    def started(request: Request) -> None:
        recorder.start(request)
        running[request.key] = f"trial {request.number}, {request.proposal.stage}: {request.name}"
        shown.now("; ".join(running.values()))

    def ended(row: TrialRow, rows: Sequence[TrialRow]) -> None:
        running.pop(row.key, None)
        shown.now("; ".join(running.values()) or "deciding on the next trial")
        recorder.catch_up(rows)
        console.print(line(experiment, row), markup=False)
        console.print(progress(experiment, rows), markup=False)

    running: dict[str, str] = {}
    # Where Ctrl-C falls elsewhere, the rows say as well where to continue.
    code = experiment.training.model.code
    with suppress(KeyboardInterrupt), connected(experiment.config.address, code=code):
        resources = experiment.resources()
        with doing("starting trials") as shown:
            drive(Proposals(experiment, partial(trial_nodes, resources), started, ended), resources)


def line(experiment: Experiment, row: TrialRow) -> str:
    validation = "" if row.val_loss is None else f"/{row.val_loss:.3f}"
    parts = [
        f"{row.number:3d} {experiment.named(row)}",
        f"{row.speed.middle:,.0f} ± {row.speed.width / 2:.1%} tokens/s" if row.speed else "no speed",
        experiment.words(row).get("memory"),
        row.mfu and f"MFU {row.mfu:.1%}",
        row.compile_seconds is not None and f"compile {row.compile_seconds:.1f} s",
        row.train_loss is not None and f"loss {row.train_loss:.3f}{validation}",
        experiment.config.cluster and f"on {row.node}",
        f"{row.outcome}: {row.reason}",
    ]
    return " | ".join(part for part in parts if part)


def progress(experiment: Experiment, rows: Sequence[TrialRow]) -> str:
    spent = sum(row.seconds for row in rows)
    left = spent / len(rows) * experiment.remaining(rows) / experiment.parallel
    times = f"spent {format_duration(round(spent))} | about {format_duration(round(left))} left"
    return f"    {experiment.best(rows)}{times}"
