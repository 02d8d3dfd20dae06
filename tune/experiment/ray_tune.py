"""Ray Tune as the runner of an experiment: it requests trials, runs each in a fresh process, and returns its row.

Ray Tune provides processes and resources. It returns a trial's row to the driver as its result, because they may not
share a disk. The only state is the rows. Tune's snapshots are not used, because they are up to a second old when the
driver is killed. A trial that cannot win ends itself (:mod:`tune.trial.early_stop`), because a scheduler of Tune would
stop it by an exception before its row is complete. A trial that exceeds its time is killed. Every trial has a row: if
it did not return one, the driver writes one with the reason.
"""

import bisect
import itertools
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import ray
import ray.tune
from ray.tune.search import Searcher

from infra.cli.console import errors
from infra.cli.interrupts import interrupts
from infra.cli.units import format_duration
from infra.device.host import count_oom_kills
from infra.errors import UserError
from infra.ray.cluster import ray_session, temporary_ray_dir
from infra.ray.machines import (
    RESPONSE_TIMEOUT_SECONDS,
    WARN_AFTER_SECONDS,
    is_pending,
    resource_wait_message,
    run_on_nodes,
)
from infra.storage.files import write_text
from tune.experiment.machines import trial_nodes
from tune.experiment.trials import Experiment
from tune.strategy.nodes import reference_row
from tune.trial.row import TrialRow, write_row
from tune.trial.run import TrialRequest, fetch_data, unmeasured_row

ATTEMPTS = 3
"""Maximum number of attempts for a trial whose process crashes or cannot start."""

PLACEMENT_TIMEOUT_SECONDS = 10.0
"""Time limit for a trial to wait for resources on one machine while other machines could run it."""

STORAGE_RETRY_SECONDS, STORAGE_TIMEOUT_SECONDS = 5.0, 600.0
"""Interval of attempts to upload a row to storage that does not respond, and the time limit for all attempts."""


TIME_METRIC, LOSS_METRIC = "run_seconds", "loss"
"""Metrics of a learning trial for a scheduler of Tune: time of the final run in seconds, and loss at this time."""

NO_METRICS = {"tokens_per_second": 0.0, TIME_METRIC: 0.0, LOSS_METRIC: math.inf}
"""Metrics of a trial that has not measured anything. Tune requires all of them in each result."""

KILLED_FOR_MEMORY = "the system killed its process because memory ran out"
"""Reason of a trial whose process the kernel killed."""


def oom_kills_on(node: str) -> int:
    """Count the processes that a node's kernel has killed because of memory; 0 if the node does not respond."""
    response = run_on_nodes([node], count_oom_kills, seconds=RESPONSE_TIMEOUT_SECONDS).get(node)
    return response if isinstance(response, int) else 0


class RunningTrial:
    """A running trial, with the time limit of its process."""

    def __init__(self, request: TrialRequest, node: str = "") -> None:
        self.request = request
        self.node = node
        """Id of the machine in Ray."""
        self.requested_at = time.monotonic()
        self.started = self.overdue = False
        self.oom_kills = 0
        """Number of processes that the machine's kernel had killed because of memory before this trial."""
        self._timer: threading.Timer | None = None

    def start_timeout(self, kill: Callable[[], None], oom_kills: int = 0) -> None:
        """Start the time limit of the trial's process, which has just started; ``kill`` is called at its end.

        ``oom_kills`` is the number of processes that the machine's kernel has killed because of memory so far.
        """

        def end() -> None:
            self.overdue = True
            kill()

        self.started = True
        self.oom_kills = oom_kills
        if self.request.timeout:
            self._timer = threading.Timer(self.request.timeout, end)
            self._timer.daemon = True  # An interrupted driver must not wait for it.
            self._timer.start()

    def cancel_timeout(self) -> None:
        if self._timer:
            self._timer.cancel()

    def missing_row_reason(self, attempts: int) -> str:
        """Format the reason why the trial returned no row after this number of attempts."""
        if self.overdue:
            limit = format_duration(round(self.request.timeout or 0.0))
            return f"killed after {limit} (--compile-time plus the time for its steps)"
        times = "once" if attempts == 1 else f"{attempts} times"
        if not self.started:
            return f"its process failed to start {times}; check Ray's logs"
        return f"its process crashed {times}; check Ray's logs and the machine's memory"


class ExperimentSearcher(Searcher):
    """An experiment as a searcher of Ray Tune. Each trial is chosen from the rows so far, for one machine."""

    def __init__(
        self, experiment: Experiment, rows: list[TrialRow], nodes: Callable[[], Mapping[str, str]],
        on_started: Callable[[TrialRequest], None], on_ended: Callable[[TrialRow], None],
        on_part: Callable[[TrialRow], None] = lambda row: None,
        oom_kills: Callable[[str], int] = oom_kills_on,
    ) -> None:  # fmt: skip
        """Create the searcher.

        Args:
            experiment: search or ladder that chooses the trials.
            rows: rows of all finished trials in the order of their starts; the searcher adds the rows of new trials.
            nodes: returns the ids by name of machines with enough resources for a trial, free or in use.
            started: called when a trial is about to start.
            ended: called with the row of a trial that has ended.
            on_part: called with the row so far of a trial that continues.
            oom_kills: returns the number of processes that a node's kernel has killed because of memory.
        """
        super().__init__(metric="tokens_per_second", mode="max")
        self.experiment, self.rows = experiment, rows
        self.nodes, self.oom_kills = nodes, oom_kills
        self.on_started, self.on_ended, self.on_part = on_started, on_ended, on_part
        self.running: dict[str, RunningTrial] = {}
        self.attempts: Counter[str] = Counter()
        """Number of attempts without a row, by the trial's key."""
        self.failure: UserError | None = None
        """The error that ends the experiment."""
        self.restart_tuner = False
        """Whether Tune must be restarted, because it can neither withdraw a trial nor wait for a machine."""
        self.avoided_machine = ""
        """Name of the machine that had no free resources for the last trial."""
        self._is_waiting = False

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Return the parameters of the next trial, None to wait for running trials, or ``FINISHED``."""
        is_ending = self.failure or self.restart_tuner or self._is_waiting
        if not is_ending and len(self.running) < self.experiment.parallel:
            if decision := self._decide():
                request, node = decision
                self.running[trial_id] = RunningTrial(request, node)
                self.on_started(request)
                return {"request": request, "node": node}
            self._is_waiting = bool(self.running)
        # Ray documents FINISHED as a return value, but the annotation of the method lacks it.
        return None if self.running else cast(dict[str, Any], Searcher.FINISHED)

    def _decide(self) -> tuple[TrialRequest, str] | None:
        """Choose the next trial and an idle machine for it; None if there is no trial or no machine.

        Returns: (trial, node id of the machine).
        """
        running = [trial.request for trial in self.running.values()]
        busy = {request.node for request in running}
        name, node = next(((name, node) for name, node in self.machines().items() if name not in busy), ("", ""))
        if not name:
            self.restart_tuner = not running
            return None
        number = max((trial.number for trial in [*self.rows, *running]), default=0) + 1
        try:
            request = self.experiment.request(name, number, self.rows, running)
        except UserError as failure:
            self.failure = failure
            return None
        return request and (request, node)

    def machines(self) -> dict[str, str]:
        """Return the node ids by name of the machines that can run trials at the moment, with the reference machine
        first."""
        nodes, reference = self.nodes(), reference_row(self.rows)
        try:
            usable = self.experiment.usable_machines(
                {machine.name for machine in self.experiment.machines} & set(nodes), self.rows
            )
        except UserError as failure:
            self.failure = failure
            return {}
        reference_machine = reference and reference.node
        order = sorted(usable, key=lambda name: (name == self.avoided_machine, name != reference_machine, name))
        return {name: nodes[name] for name in order}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Start the time limit of a trial's process at its first result, which reports that it has started."""
        trial = self.running.get(trial_id)
        if trial and "actor" in result:
            trial.start_timeout(lambda: ray.kill(result["actor"]), result["oom_kills"])
        elif "row" in result:
            self.on_part(result["row"])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Store the trial's row. If it returned none, store a row with the reason, or run the trial again.

        A trial runs again if it has no row, because the experiment then chooses it again.
        """
        trial = self.running.pop(trial_id, None)
        if trial is None:
            return
        trial.cancel_timeout()
        self._is_waiting = False
        request, result = trial.request, result or {}
        seconds = time.monotonic() - trial.requested_at
        if row := result.get("row"):
            row = replace(row, seconds=seconds)
        elif self.restart_tuner or self.failure:
            return  # The trial was withdrawn.
        elif error and not trial.overdue and trial.node not in self.nodes().values():
            errors.print(f"Trial {request.number}: lost the machine {request.node}. Retrying.", markup=False)
            return
        elif trial.started and not trial.overdue and self.oom_kills(trial.node) > trial.oom_kills:
            row = unmeasured_row(request, "oom", KILLED_FOR_MEMORY, seconds)  # A retry would also be killed.
        else:
            self.attempts[request.key] += 1
            attempts = self.attempts[request.key]
            reason = result.get("refused") or trial.missing_row_reason(attempts)
            if attempts < ATTEMPTS and not trial.overdue:
                errors.print(f"Trial {request.number}: {reason}. Retrying.", markup=False)
                return
            row = unmeasured_row(request, "failed", reason, seconds)
        try:
            self._store(row, result.get("traceback"))
        except UserError as failure:
            self.failure = failure
            return
        self.on_ended(row)

    def _store(self, row: TrialRow, traceback: str | None) -> None:
        """Store ``row`` in the experiment's folder. Raises ``UserError`` if that fails."""
        trials = self.experiment.trials
        if traceback:
            write_text(trials / f"{row.key}.txt", traceback)
        write_row(trials, row)
        bisect.insort(self.rows, row, key=lambda row: row.number)
        started_at = time.monotonic()
        while True:
            try:
                return self.experiment.workspace.push(trials / f"{row.key}.txt", trials / f"{row.key}.json")
            except UserError as failure:
                if time.monotonic() - started_at > STORAGE_TIMEOUT_SECONDS:
                    raise
                if interrupts.stop_requested:
                    raise KeyboardInterrupt from failure
                errors.print(
                    f"Cannot upload the result of trial {row.number}: {failure} Retrying every "
                    f"{STORAGE_RETRY_SECONDS:.0f} s. Press Ctrl-C to exit.",
                    markup=False,
                )
                time.sleep(STORAGE_RETRY_SECONDS)

    def __getstate__(self) -> dict[str, Any]:
        """Return an empty state for Tune's snapshots, which pickle the searcher, because the rows are the state."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Do nothing, because the rows are the state."""

    def restore(self, checkpoint_path: str) -> None:
        """Do nothing, because the rows are the state."""


class PlacementStopper(ray.tune.Stopper):
    """Warns if a trial waits for resources, and restarts Tune if another machine is free and no trial runs."""

    def __init__(self, searcher: ExperimentSearcher, resources: dict[str, float]) -> None:
        self.searcher, self.resources = searcher, resources
        self.waiting_since: float | None = None
        self.has_warned = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Return whether to stop a trial; always False, because trials end themselves."""
        return False

    def stop_all(self) -> bool:
        """Return whether to end Tune, which calls this method several times per second."""
        searcher, running = self.searcher, list(self.searcher.running.values())
        if searcher.failure or interrupts.stop_requested:
            return True
        if all(trial.started for trial in running) or not is_pending([self.resources]):
            self.waiting_since, self.has_warned = None, False
            return False
        self.waiting_since = self.waiting_since or time.monotonic()
        waited = time.monotonic() - self.waiting_since
        if waited >= WARN_AFTER_SECONDS and not self.has_warned:
            self.has_warned = True
            errors.print(resource_wait_message("a trial", [self.resources]), markup=False)
        if waited < PLACEMENT_TIMEOUT_SECONDS or any(trial.started for trial in running):
            return False
        self.waiting_since = None
        if set(searcher.machines().values()) - {trial.node for trial in running}:
            searcher.avoided_machine = running[0].request.node
            searcher.restart_tuner = True  # This withdraws the trial, which is then chosen for another machine.
        return searcher.restart_tuner

    def __getstate__(self) -> dict[str, Any]:
        return {}


def trainable(parameters: dict[str, Any]) -> dict[str, Any] | None:
    """Run a trial in a fresh process of Ray Tune: report that the process has started, and then the trial's row.

    If the trial has no row, the result has the reason as ``refused``.
    """
    try:
        fetch_data(parameters["request"])  # Downloading must not count as trial time.
    except UserError as failure:
        return NO_METRICS | {"refused": str(failure)}
    started = {"actor": ray.get_runtime_context().current_actor, "oom_kills": count_oom_kills()}
    ray.tune.report(NO_METRICS | started)
    for row, traceback in parameters["request"].rows():
        metrics = {"tokens_per_second": row.tokens_per_second}
        if row.stage == "learn" and row.rungs:
            metrics |= {TIME_METRIC: row.rungs[-1].seconds, LOSS_METRIC: row.rungs[-1].comparable_loss}
        ray.tune.report(NO_METRICS | metrics | {"row": row, "traceback": traceback})  # A scheduler may end it here.
    return None


def run_trials(
    experiment: Experiment,
    rows: list[TrialRow],
    on_started: Callable[[TrialRequest], None],
    on_ended: Callable[[TrialRow], None],
    on_part: Callable[[TrialRow], None],
) -> None:
    """Run the trials of ``experiment`` on its Ray, and add their rows to ``rows``, until it is finished or stopped."""
    with ray_session(experiment.config.address, code=experiment.training.model.source_paths):
        resources = experiment.resources()
        nodes = partial(trial_nodes, resources)
        run_tuner(ExperimentSearcher(experiment, rows, nodes, on_started, on_ended, on_part), resources)


def run_tuner(searcher: ExperimentSearcher, resources: dict[str, float]) -> None:
    """Run trials with these ``resources`` until none is left or a stop is requested."""
    os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # Tune's new console prints a box even with verbose=0.
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # They would copy the rows to CSV and JSON files.
    # Tune's final summary counts retried processes as failures.
    logging.getLogger("ray.tune.tune").setLevel(logging.CRITICAL)
    # Tune prints a traceback of Ray for each crashed process. The driver reports the retry instead.
    logging.getLogger("ray.tune.execution.tune_controller").setLevel(logging.CRITICAL)
    folder = searcher.experiment.folder

    def placed_on(parameters: dict[str, Any]) -> ray.tune.PlacementGroupFactory:
        label = {"ray.io/node-id": parameters["node"]}
        return ray.tune.PlacementGroupFactory([resources], bundle_label_selector=[label])

    with temporary_ray_dir(folder) as ray_folder:
        for number in itertools.count():
            _await_machine(searcher, resources)
            tuner = ray.tune.Tuner(
                ray.tune.with_resources(trainable, placed_on),
                tune_config=ray.tune.TuneConfig(
                    search_alg=searcher, scheduler=searcher.experiment.scheduler(searcher.rows), num_samples=-1,
                    reuse_actors=False,
                    trial_dirname_creator=lambda trial: trial.trial_id,
                ),
                run_config=ray.tune.RunConfig(
                    name=f"{ray_folder.name}-{number}" if number else ray_folder.name, storage_path=str(folder),
                    stop=PlacementStopper(searcher, resources), verbose=0,
                ),
            )  # fmt: skip
            with interrupts.stop_requests("Stopping the running trials"):
                tuner.fit()
                is_finished = interrupts.stop_requested or not searcher.restart_tuner
            if searcher.failure:
                raise searcher.failure
            if is_finished:
                return


def _await_machine(searcher: ExperimentSearcher, resources: dict[str, float]) -> None:
    """Wait until there is a machine for trials, and print a message while there is none."""
    searcher.running.clear()
    searcher.restart_tuner = False
    has_warned = False
    while not searcher.machines():
        if searcher.failure:
            raise searcher.failure
        if not has_warned:
            errors.print(resource_wait_message("a trial", [resources]), markup=False)
            has_warned = True
        time.sleep(1)
