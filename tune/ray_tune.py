"""Ray Tune around a strategy: it asks for trials, runs each in a fresh process, and hands over their ends.

In: a strategy and the search's folder. Out: rows in the folder. Ray Tune supplies processes and
resources; what has been done is read from the rows alone, never from Tune's own snapshots, which are
up to a second old when the driver is killed. A trial that cannot win ends itself (:mod:`tune.trial.early_stop`):
a scheduler of Tune's would stop it by an exception in the middle of its row. One that does not end is
killed, and every trial gets a row: where it did not arrive, the driver writes one that says why.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import ray
import ray.tune
from ray.tune.search import Searcher

from infra.cluster import cores_each, eligible_nodes, placing, ray_files
from infra.command import console, errors
from infra.errors import UserError, first_line
from infra.units import format_duration
from tune.plan import Search
from tune.strategy.base import enough_seconds
from tune.trial.row import Proposal, TrialRow, read_rows, write_row
from tune.trial.run import Request, run

ATTEMPTS = 3
"""Times a trial is begun whose process dies or whose row does not arrive; what a configuration does is an outcome."""


@dataclass(frozen=True)
class Listener:
    """What the driver tells the world: a trial is about to start, and a trial has ended."""

    started: Callable[[Request], None]
    ended: Callable[[TrialRow, Sequence[TrialRow]], None]


class Running:
    """A trial that is running, and the limit on its process."""

    def __init__(self, request: Request, seconds: float) -> None:
        self.request = request
        self.seconds = seconds
        self.started = self.overdue = False
        self._kill: Callable[[], None] = lambda: None
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True  # or a driver that is interrupted would wait for it

    def limit(self, kill: Callable[[], None]) -> None:
        """The trial's process has started: call ``kill`` unless it has ended before its time is up."""
        self._kill = kill
        self.started = True
        self._timer.start()

    def ended(self) -> None:
        """The process has ended, by itself or not."""
        self._timer.cancel()

    def _end(self) -> None:
        self.overdue = True
        self._kill()

    def why_no_row(self, error: bool, attempts: int, rows: Path) -> str:
        """Why the trial left no row in ``rows`` after so many attempts."""
        if self.overdue:
            limit = format_duration(round(self.seconds))
            return f"it was still running after {limit}, --compile-time and its steps' time, and was killed"
        times = "once" if attempts == 1 else f"{attempts} times"
        if not error:
            return f"it ran {times} and its row did not arrive: can its process write to {rows}?"
        if not self.started:
            return f"its process could not be started, tried {times}: see Ray's logs"
        return f"its process died {times}: see Ray's logs, and whether the machine has enough memory"


class Proposals(Searcher):
    """A strategy as Ray Tune's searcher: one trial at a time, decided from the rows on disk.

    A trial's process is killed ``--compile-time`` and its request's ``most_seconds`` after it has started.
    """

    def __init__(self, search: Search, listener: Listener) -> None:
        super().__init__(metric="tokens_per_second", mode="max")
        self.search = search
        self.rows = search.trials
        self.listener = listener
        self.running: dict[str, Running] = {}
        self.attempts: Counter[str] = Counter()
        """Attempts without a row, by the trial's key."""

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The next trial's parameters, None while one runs, or ``FINISHED``."""
        if self.running:
            return None
        rows = read_rows(self.rows)
        proposal = self.search.strategy.propose(rows)
        if proposal is None:
            return cast(dict[str, Any], Searcher.FINISHED)  # Ray's marker is a string, its signature is narrower
        request = self.request(proposal, rows)
        self.running[trial_id] = Running(request, self.search.config.compile_time + request.most_seconds)
        self.listener.started(request)
        return {"request": request}

    def request(self, proposal: Proposal, rows: Sequence[TrialRow]) -> Request:
        """What the trial's process is told."""
        search, config = self.search, self.search.config
        if proposal.predicted_memory is None:  # a grid's, Optuna's, a repetition, or a confirmation
            predicted = search.memory.curves(rows).memory(proposal.candidate)
            proposal = replace(proposal, predicted_memory=predicted)
        seconds = enough_seconds(rows, config.trial_time)
        if seconds > config.trial_time:
            console.print(f"    its steps get {format_duration(round(seconds, 1))}, because --trial-time was too short")
        return Request(
            key=proposal.key(search.folder.name),
            number=len(rows) + 1,
            proposal=proposal,
            config=search.space.config(proposal.candidate).to_json() | {"data": str(search.data)},
            memory_limit=search.limit,
            most_steps=config.trial_steps,
            most_seconds=seconds,
            precision=config.trial_precision,
            folder=str(self.rows),
            asked_at=time.time(),
        )

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Limit the time of a trial's process, whose first result says that it has started."""
        trial = self.running.get(trial_id)
        if trial and "actor" in result:
            trial.limit(lambda: ray.kill(result["actor"]))

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take a trial's row; where there is none, have the trial run again, or write one that says why.

        What has no row is proposed again.
        """
        trial = self.running.pop(trial_id, None)
        if trial is None:
            return
        trial.ended()
        request = trial.request
        rows = {row.key: row for row in read_rows(self.rows)}
        if request.key not in rows:
            self.attempts[request.key] += 1
            attempts = self.attempts[request.key]
            refused = (result or {}).get("refused")
            reason = refused or trial.why_no_row(error, attempts, self.rows)
            if attempts < ATTEMPTS and not (refused or trial.overdue):
                errors.print(f"Trial {request.number}: {reason}. It runs again.", markup=False)
                return
            row = TrialRow(
                key=request.key, number=request.number, stage=request.proposal.stage, round=request.proposal.round,
                candidate=request.proposal.candidate, outcome="failed",
                accumulation=request.config["global_batch"] // request.config["micro_batch"],
                reason=reason, seconds=time.time() - request.asked_at,
            )  # fmt: skip
            write_row(self.rows, row)
            rows[row.key] = row
        self.listener.ended(rows[request.key], list(rows.values()))

    def have_started(self) -> bool:
        """Whether every trial that was asked for has its process."""
        return all(trial.started for trial in list(self.running.values()))

    def __getstate__(self) -> dict[str, Any]:
        """Nothing for Tune's snapshots, which pickle their searcher: the rows are the state."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""


def trainable(parameters: dict[str, Any]) -> dict[str, Any]:
    """What Ray Tune runs in a process of its own: it says that it has started, and then what became of it."""
    ray.tune.report({"tokens_per_second": 0.0, "actor": ray.get_runtime_context().current_actor})
    return outcome(parameters["request"])


def outcome(request: Request) -> dict[str, Any]:
    """Run a trial: its result for Tune, with its row on disk, or with the reason why it is not as ``refused``."""
    try:
        row = run(request)
    except Exception as failure:  # noqa: BLE001 the driver needs the reason, and Tune would hand on none
        return {"tokens_per_second": 0.0, "refused": f"it could not leave its row: {first_line(failure)}"}
    return {"tokens_per_second": row.tokens_per_second or 0.0, "outcome": row.outcome}


def drive(proposals: Proposals) -> None:
    """Run trials until the strategy has no more, or until Ctrl-C, which Tune takes between two events."""
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # its console prints a box of its own even when silenced
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # CSV and JSON copies of the rows
    logging.getLogger("ray.tune.tune").setLevel(logging.CRITICAL)  # at the end it counts also processes that ran again
    search = proposals.search
    resources = trial_resources(search.device == "cuda")
    with ray_files(search.folder) as place, placing("a trial", [resources], proposals.have_started):
        ray.tune.Tuner(
            ray.tune.with_resources(trainable, resources),
            tune_config=ray.tune.TuneConfig(
                search_alg=proposals,
                num_samples=-1,
                reuse_actors=False,
                trial_dirname_creator=lambda trial: trial.trial_id,
            ),
            run_config=ray.tune.RunConfig(
                name=place.name,
                storage_path=str(search.folder),
                verbose=0,
            ),
        ).fit()


def trial_resources(use_gpu: bool) -> dict[str, float]:
    """What a run gets on the machine with the most room: a trial has it to itself, as the run that it stands for."""
    cores = cores_each(eligible_nodes(), 1, gpu=use_gpu)
    if not cores:
        raise UserError(
            "the Ray cluster has no cores for trials: start it with 'ray start --head --num-cpus=1' or more."
        )
    return {"CPU": float(cores)} | ({"GPU": 1.0} if use_gpu else {})
