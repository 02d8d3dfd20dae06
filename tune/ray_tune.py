"""Ray Tune around an experiment: it asks for trials, runs each in a fresh process, and hands over their ends.

Ray Tune supplies processes and resources, and brings a trial's row to the driver as its result, because the trial's
machine may share no disk with it; what has been done is read from the rows alone, never from Tune's own snapshots,
which are up to a second old when the driver is killed. A trial that cannot win ends itself
(:mod:`tune.trial.early_stop`): a scheduler of Tune's would stop it by an exception in the middle of its row. One that
does not end is killed, and every trial gets a row: where it did not arrive, the driver writes one that says why.
"""

import itertools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import ray
import ray.tune
from ray.tune.search import Searcher

from infra.cluster import ray_files
from infra.console import errors
from infra.errors import UserError, first_line
from infra.host import count_oom_kills
from infra.machines import ASKING_SECONDS, PLACING_SECONDS, ask_nodes, is_pending, lack
from infra.schema import from_json, to_json
from infra.storage import write_text
from infra.units import format_duration
from tune.experiment import Experiment
from tune.folder import TRIALS
from tune.strategy.nodes import first_row
from tune.trial.row import TrialRow, read_rows, write_row
from tune.trial.run import Request, fetch_data, run, unmeasured

ATTEMPTS = 3
"""Times a trial is begun whose process dies or that does not get to run; what a configuration does is an outcome."""

UNPLACED_SECONDS = 10.0
"""How long a trial may wait for room on one machine while others could run it."""

STORAGE_PAUSE, STORAGE_PATIENCE = 5.0, 600.0
"""Seconds between attempts to send a row to storage that does not answer, and for all of them."""


KILLED_FOR_MEMORY = "the system killed its process because memory ran out"


def oom_kills_on(node: str) -> int:
    """How many processes the kernel of this machine of the connected Ray has killed; 0 where it does not answer."""
    answer = ask_nodes([node], count_oom_kills, seconds=ASKING_SECONDS).get(node)
    return answer if isinstance(answer, int) else 0


class Running:
    """A trial that is running, and the limit on its process."""

    def __init__(self, request: Request, node: str = "") -> None:
        self.request = request
        self.node = node
        """Ray's id of the machine."""
        self.asked_at = time.monotonic()
        self.started = self.overdue = False
        self.oom_kills = 0
        """Processes that its machine's kernel had killed before it, because memory ran out."""
        self._timer: threading.Timer | None = None

    def limit(self, kill: Callable[[], None], oom_kills: int = 0) -> None:
        """The trial's process has started: call ``kill`` unless it has ended before its time is up."""

        def end() -> None:
            self.overdue = True
            kill()

        self.started = True
        self.oom_kills = oom_kills
        if self.request.patience:
            self._timer = threading.Timer(self.request.patience, end)
            self._timer.daemon = True  # or a driver that is interrupted would wait for it
            self._timer.start()

    def ended(self) -> None:
        if self._timer:
            self._timer.cancel()

    def why_no_row(self, attempts: int) -> str:
        """Why the trial sent no row, after so many attempts."""
        if self.overdue:
            limit = format_duration(round(self.request.patience or 0.0))
            return f"it was still running after {limit}, --compile-time and its steps' time, and was killed"
        times = "once" if attempts == 1 else f"{attempts} times"
        if not self.started:
            return f"its process could not be started, tried {times}: see Ray's logs"
        return f"its process died {times}: see Ray's logs, and whether the machine has enough memory"


class Proposals(Searcher):
    """An experiment as Ray Tune's searcher: trials are decided from the rows on disk, each for a machine of its own."""

    def __init__(
        self, experiment: Experiment, nodes: Callable[[], Mapping[str, str]], started: Callable[[Request], None],
        ended: Callable[[TrialRow, Sequence[TrialRow]], None], oom_kills: Callable[[str], int] = oom_kills_on,
    ) -> None:  # fmt: skip
        """``nodes`` returns the machines that have room for a trial, busy or not: their ids by name.

        ``started`` is told that a trial is about to start, ``ended`` its row and those of all trials. ``oom_kills``
        returns for a machine's id how many processes its kernel has killed because memory ran out.
        """
        super().__init__(metric="tokens_per_second", mode="max")
        self.experiment = experiment
        self.nodes, self.started, self.ended, self.oom_kills = nodes, started, ended, oom_kills
        self.rows = experiment.trials
        self.running: dict[str, Running] = {}
        self.attempts: Counter[str] = Counter()
        """Attempts without a row, by the trial's key."""
        self.failure: UserError | None = None
        """Why the experiment cannot continue."""
        self.restart_tuner = False
        """Whether Tune was ended in order to begin again: it can neither withdraw a trial nor wait for a machine."""
        self.avoided = ""
        """Name of the machine that had no room for the last trial."""
        self._nothing_to_do = False

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The next trial's parameters, None while there is nothing to do but wait, or ``FINISHED``."""
        ending = self.failure or self.restart_tuner or self._nothing_to_do
        if not ending and len(self.running) < self.experiment.parallel:
            if decided := self._decide():
                request, node = decided
                self.running[trial_id] = Running(request, node)
                self.started(request)
                return {"request": request, "node": node}
            self._nothing_to_do = bool(self.running)
        # Ray's marker is a string, its signature is narrower.
        return None if self.running else cast(dict[str, Any], Searcher.FINISHED)

    def _decide(self) -> tuple[Request, str] | None:
        """The next trial, and the id of the machine for it, which no other trial has."""
        running = [trial.request for trial in self.running.values()]
        taken = {request.node for request in running}
        name, node = next(((name, node) for name, node in self.machines().items() if name not in taken), ("", ""))
        if not name:
            self.restart_tuner = not running
            return None
        rows = read_rows(self.rows)
        number = max((known.number for known in [*rows, *running]), default=0) + 1
        try:
            request = self.experiment.request(name, number, rows, running)
        except UserError as failure:
            self.failure = failure
            return None
        return request and (request, node)

    def machines(self) -> dict[str, str]:
        """Node ids by name of the machines that trials may run on now, first the one that others are compared with."""
        rows, nodes = read_rows(self.rows), self.nodes()
        first = first_row(rows)
        try:
            usable = self.experiment.usable({machine.name for machine in self.experiment.machines} & set(nodes), rows)
        except UserError as failure:
            self.failure = failure
            return {}
        order = sorted(usable, key=lambda name: (name == self.avoided, name != (first and first.node), name))
        return {name: nodes[name] for name in order}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Limit the time of a trial's process, whose first result says that it has started."""
        trial = self.running.get(trial_id)
        if trial and "actor" in result:
            trial.limit(lambda: ray.kill(result["actor"]), result["oom_kills"])

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Keep a trial's row; where there is none, have the trial run again, or write one that says why.

        What has no row is proposed again.
        """
        trial = self.running.pop(trial_id, None)
        if trial is None:
            return
        trial.ended()
        self._nothing_to_do = False
        request, result = trial.request, result or {}
        seconds = time.monotonic() - trial.asked_at
        if sent := result.get("row"):
            row = replace(from_json(TrialRow, json.loads(sent), "the trial's row"), seconds=seconds)
        elif self.restart_tuner or self.failure:
            return  # it was withdrawn
        elif error and not trial.overdue and trial.node not in self.nodes().values():
            errors.print(f"Trial {request.number}: {request.node} was lost. It runs again.", markup=False)
            return
        elif trial.started and not trial.overdue and self.oom_kills(trial.node) > trial.oom_kills:
            row = unmeasured(request, "oom", KILLED_FOR_MEMORY, seconds)  # and would be killed again
        else:
            self.attempts[request.key] += 1
            attempts = self.attempts[request.key]
            reason = result.get("refused") or trial.why_no_row(attempts)
            if attempts < ATTEMPTS and not trial.overdue:
                errors.print(f"Trial {request.number}: {reason}. It runs again.", markup=False)
                return
            row = unmeasured(request, "failed", reason, seconds)
        try:
            self._keep(row, result.get("traceback"))
        except UserError as failure:
            self.failure = failure
            return
        self.ended(row, read_rows(self.rows))

    def _keep(self, row: TrialRow, traceback: str | None) -> None:
        """Write ``row`` where the experiment belongs. Raises ``UserError`` when that cannot be written."""
        if traceback:
            write_text(self.rows / f"{row.key}.txt", traceback)
        write_row(self.rows, row)
        since = time.monotonic()
        while True:
            try:
                return self.experiment.working_copy.send(f"{TRIALS}/{row.key}.txt", f"{TRIALS}/{row.key}.json")
            except UserError as failure:
                if time.monotonic() - since > STORAGE_PATIENCE:
                    raise
                errors.print(f"Waiting for storage: {failure}", markup=False)
                time.sleep(STORAGE_PAUSE)

    def __getstate__(self) -> dict[str, Any]:
        """Nothing for Tune's snapshots, which pickle their searcher: the rows are the state."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""


class Placing(ray.tune.Stopper):
    """Says when a trial finds no room, and ends Tune when it is the only one and another machine could run it."""

    def __init__(self, proposals: Proposals, resources: dict[str, float]) -> None:
        self.proposals, self.resources = proposals, resources
        self.since: float | None = None
        self.told = False

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        """Never stops a single trial."""
        return False

    def stop_all(self) -> bool:
        """Whether to end Tune; asked several times a second."""
        proposals, running = self.proposals, list(self.proposals.running.values())
        if proposals.failure:
            return True
        if all(trial.started for trial in running) or not is_pending([self.resources]):
            self.since, self.told = None, False
            return False
        self.since = self.since or time.monotonic()
        waited = time.monotonic() - self.since
        if waited >= PLACING_SECONDS and not self.told:
            self.told = True
            errors.print(lack("a trial", [self.resources]), markup=False)
        if waited < UNPLACED_SECONDS or any(trial.started for trial in running):
            return False
        self.since = None
        if set(proposals.machines().values()) - {trial.node for trial in running}:
            proposals.avoided = running[0].request.node
            proposals.restart_tuner = True  # what was asked for is forgotten, and proposed again on other machines
        return proposals.restart_tuner

    def __getstate__(self) -> dict[str, Any]:
        return {}


def trainable(parameters: dict[str, Any]) -> dict[str, Any]:
    """What Ray Tune runs in a process of its own: it reports that it has started, and then its outcome."""
    try:
        fetch_data(parameters["request"])  # its time is not the trial's
    except UserError as failure:
        return {"tokens_per_second": 0.0, "refused": str(failure)}
    started = {"actor": ray.get_runtime_context().current_actor, "oom_kills": count_oom_kills()}
    ray.tune.report({"tokens_per_second": 0.0} | started)
    return outcome(parameters["request"])


def outcome(request: Request) -> dict[str, Any]:
    """Run a trial: its result for Tune, with its row as JSON, or with the reason why there is none as ``refused``.

    Tune flattens dictionaries, so the row is a string.
    """
    try:
        row, traceback = run(request)
    except Exception as failure:  # noqa: BLE001 the driver needs the reason, and Tune would hand on none
        return {"tokens_per_second": 0.0, "refused": f"it could not be run: {first_line(failure)}"}
    sent = json.dumps(to_json(row))
    return {"tokens_per_second": row.tokens_per_second or 0.0, "row": sent, "traceback": traceback}


def drive(proposals: Proposals, resources: dict[str, float]) -> None:
    """Run trials with ``resources`` each, until the strategy has no more or Ctrl-C, which Tune takes between events."""
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # its console prints a box of its own even when silenced
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # CSV and JSON copies of the rows
    logging.getLogger("ray.tune.tune").setLevel(logging.CRITICAL)  # at the end it counts also processes that ran again
    # It prints a traceback of Ray's own for each process that dies, of which we report what is done about it.
    logging.getLogger("ray.tune.execution.tune_controller").setLevel(logging.CRITICAL)
    folder = proposals.experiment.folder

    def placed_on(parameters: dict[str, Any]) -> ray.tune.PlacementGroupFactory:
        label = {"ray.io/node-id": parameters["node"]}
        return ray.tune.PlacementGroupFactory([resources], bundle_label_selector=[label])

    with ray_files(folder) as place:
        for number in itertools.count():
            _await_machine(proposals, resources)
            ray.tune.Tuner(
                ray.tune.with_resources(trainable, placed_on),
                tune_config=ray.tune.TuneConfig(
                    search_alg=proposals, num_samples=-1, reuse_actors=False,
                    trial_dirname_creator=lambda trial: trial.trial_id,
                ),
                run_config=ray.tune.RunConfig(
                    name=f"{place.name}-{number}" if number else place.name, storage_path=str(folder),
                    stop=Placing(proposals, resources), verbose=0,
                ),
            ).fit()  # fmt: skip
            if proposals.failure:
                raise proposals.failure
            if not proposals.restart_tuner:
                return


def _await_machine(proposals: Proposals, resources: dict[str, float]) -> None:
    """Wait until there is a machine for trials, and say so; Tune would wait without taking Ctrl-C."""
    proposals.running.clear()
    proposals.restart_tuner = False
    told = False
    while not proposals.machines():
        if proposals.failure:
            raise proposals.failure
        if not told:
            errors.print(lack("a trial", [resources]), markup=False)
            told = True
        time.sleep(1)
