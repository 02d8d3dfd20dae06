"""A search or ladder from its start to its end: run the trials, record them, and publish the report."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TypeVar

from infra.cli.console import console
from infra.cli.interrupts import EXIT_INTERRUPTED
from infra.cli.progress import status
from infra.cli.units import format_duration
from infra.errors import UserError
from infra.ray.cluster import ray_session
from infra.tracking.store import open_store, read_logged
from infra.tracking.tracker import Tracker
from infra.tracking.views import ui_link
from train.run_files.run_folder import resume_command
from tune.config import LadderConfig, SearchConfig
from tune.experiment.folder import RESULT, open_workspace, resumed_parent
from tune.experiment.ray_tune import run_trials
from tune.experiment.tracking import TrialRuns, complete_orphaned_experiments, log_result, log_start, open_parent
from tune.experiment.trials import Experiment
from tune.trial.row import TrialRow, read_rows
from tune.trial.run import TrialRequest

Kind = TypeVar("Kind", bound=Experiment)

Publish = Callable[[Kind, Sequence[TrialRow]], None]
"""Function that prints and stores the results of all trials, from which the run in MLflow is filled."""


def run_experiment(
    config: SearchConfig | LadderConfig,
    make: Callable[[Any], Kind],
    print_introduction: Callable[[Kind], None],
    publish: Publish[Kind],
) -> int:
    """Run the experiment that ``make`` creates from ``config``, and return the exit code.

    ``print_introduction`` prints a summary of the experiment and, for a dry run, its plan.
    """
    with ray_session(config.address, code=config.training.model.source_paths) if config.cluster else nullcontext():
        experiment = make(config)
        if config.cluster:
            experiment.resources()  # A cluster without cores for trials is rejected before anything is created.
        print_introduction(experiment)
        if config.dry_run:
            return 0
        open_store(config.tracking_uri)  # An MLflow store that cannot be used is rejected before anything is created.
        with open_workspace(experiment.directory, experiment.config.kind) as workspace:
            rows = _reusable_rows(experiment)  # Damaged rows are rejected before a run in MLflow is created.
            try:
                return _run(experiment, rows, publish)
            except UserError:
                has_trained = any(row.step_seconds for row in rows)
                if not (config.resume or has_trained or any(experiment.trials.glob("*.txt"))):  # *.txt are tracebacks.
                    workspace.remove()  # The corrected command can then use the same name.
                raise


def _run(experiment: Kind, rows: list[TrialRow], publish: Publish[Kind]) -> int:
    """Run trials until none is left, add their rows to ``rows``, publish the results, and return the exit code."""
    kind, is_resumed = experiment.config.kind, bool(experiment.config.resume)
    if is_resumed:
        parent = resumed_parent(experiment.directory, kind, experiment.identity())
        console.print(f"resuming with {len(rows)} finished trial{'s' * (len(rows) != 1)}")
    else:
        parent = open_parent(experiment)
    record = experiment.record(parent)
    trial_runs = TrialRuns(record, resumed=is_resumed)
    with Tracker(parent, read_logged(parent) if is_resumed else None) as tracker:
        log_start(tracker, record)
        complete_orphaned_experiments(record)
        try:
            trial_runs.fill(rows)
            if not experiment.is_finished(rows):
                (experiment.folder / RESULT).unlink(missing_ok=True)  # More trials make the result outdated.
                _drive(experiment, rows, trial_runs)
            trial_runs.fill(rows)
        finally:
            trial_runs.close()
        if not experiment.is_finished(rows):
            command = resume_command(f"tune.{kind}", experiment.directory)
            console.print(f"stopped; resume with: {command}", markup=False)
            tracker.status = "KILLED"
            return EXIT_INTERRUPTED
        publish(experiment, rows)
        result = log_result(tracker, experiment.folder)
    console.print(ui_link(parent, children=True), markup=False)
    return 0 if result and result.has_winner else 1


def _reusable_rows(experiment: Experiment) -> list[TrialRow]:
    """Read the rows that are reused, and delete the rows of trials that will run again."""
    rows = read_rows(experiment.trials)
    for row in rows:
        if not experiment.is_reusable(row):
            (experiment.trials / f"{row.key}.json").unlink()
    return list(filter(experiment.is_reusable, rows))


def _drive(experiment: Experiment, rows: list[TrialRow], trial_runs: TrialRuns) -> None:
    """Run trials and add their rows to ``rows``, until none is left or the user presses Ctrl-C."""

    def on_started(request: TrialRequest) -> None:
        trial_runs.open(request)
        running[request.key] = experiment.describe_running(request)
        live_status.update("; ".join(running.values()))

    def on_ended(row: TrialRow) -> None:
        running.pop(row.key, None)
        live_status.update("; ".join(running.values()) or "choosing the next trial")
        trial_runs.fill(rows)
        console.print(format_trial(experiment, row), markup=False)
        console.print(format_progress(experiment, rows), markup=False)

    def on_part(row: TrialRow) -> None:
        if part := experiment.describe_part(row):
            console.print(part, markup=False)

    running: dict[str, str] = {}
    # Ctrl-C may interrupt at any point, because an experiment is resumed from the rows on disk.
    with suppress(KeyboardInterrupt), status("starting trials") as live_status:
        run_trials(experiment, rows, on_started, on_ended, on_part)


def format_trial(experiment: Experiment, row: TrialRow) -> str:
    """Format the line that is printed when a trial ends: configuration, measurements, and outcome with its reason."""
    fields = [
        f"{row.number:3d} {experiment.trial_label(row)}",
        *experiment.measurements(row),
        experiment.config.cluster and f"on {row.node}",
        f"{row.outcome}: {row.reason}",
    ]
    return " | ".join(text for text in fields if text)


def format_progress(experiment: Experiment, rows: Sequence[TrialRow]) -> str:
    """Format the progress after a trial: the best candidate so far, and the elapsed and remaining time."""
    elapsed, seconds_left = sum(row.seconds for row in rows), experiment.seconds_left(rows)
    times = f"elapsed {format_duration(round(elapsed))} | about {format_duration(round(seconds_left))} left"
    return f"    {experiment.describe_best(rows)}{times}"
