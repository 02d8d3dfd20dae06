"""Ray Tune around a strategy: it asks for trials, runs each in a fresh process, and hands over their ends.

In: a strategy and the search's folder. Out: rows in the folder. Ray Tune supplies processes, resources
and retries; what has been done is read from the rows alone, never from Tune's own snapshots, which are
up to a second old when the driver is killed. A trial that cannot win ends itself (:mod:`tune.racing`):
a scheduler of Tune's would stop it by an exception in the middle of its row.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
import ray.tune
from ray.tune.search import Searcher

from infra.cluster import cores_each, eligible_nodes, placing, ray_files
from infra.command import UserError
from tune.record import Proposal, Row, read_rows, write_row
from tune.strategies import Strategy
from tune.trial import Request, run

RETRIES = 2
"""Times a trial whose process was killed from outside runs again; what a configuration itself does is an outcome."""


@dataclass(frozen=True)
class Listener:
    """What the driver tells the world: a trial is about to start, and a trial has ended."""

    started: Callable[[Request], None]
    ended: Callable[[Row, Sequence[Row]], None]


class Proposals(Searcher):
    """A strategy as Ray Tune's searcher: one trial at a time, decided from the rows on disk."""

    def __init__(
        self, strategy: Strategy, rows: Path, listener: Listener, request: Callable[[Proposal, int], Request]
    ) -> None:
        super().__init__(metric="tokens_per_second", mode="max")
        self.strategy = strategy
        self.rows = rows
        self.listener = listener
        self.request = request
        self.running: dict[str, Request] = {}

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """The next trial's parameters, None while one runs, or ``FINISHED``."""
        if self.running:
            return None
        rows = read_rows(self.rows)
        proposal = self.strategy.propose(rows)
        if proposal is None:
            return cast(dict[str, Any], Searcher.FINISHED)  # Ray's marker is a string, its signature is narrower
        request = self.request(proposal, len(rows) + 1)
        self.running[trial_id] = request
        self.listener.started(request)
        return {"request": request}

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Take a trial's row; where its process died for good, write the row that it could not."""
        request = self.running.pop(trial_id, None)
        if request is None:
            return
        rows = {row.key: row for row in read_rows(self.rows)}
        if request.key not in rows:
            if not error:
                return  # stopped by Ctrl-C: it has no outcome and will be proposed again
            row = Row(
                key=request.key, number=request.number, stage=request.proposal.stage, round=request.proposal.round,
                candidate=request.proposal.candidate, outcome="failed",
                accumulation=request.config["global_batch"] // request.config["micro_batch"],
                reason=f"its process was killed {RETRIES + 1} times", seconds=time.time() - request.asked_at,
            )  # fmt: skip
            write_row(self.rows, row)
            rows[row.key] = row
        self.listener.ended(rows[request.key], list(rows.values()))

    def __getstate__(self) -> dict[str, Any]:
        """Nothing for Tune's snapshots, which pickle their searcher: the rows are the state."""
        return {}

    def save(self, checkpoint_path: str) -> None:
        """Nothing to save."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing to restore."""


class Placed(ray.tune.Callback):
    """Whether the trial that was asked for has a place: one runs at a time."""

    now = False

    def on_trial_start(self, *_: Any, **__: Any) -> None:
        """Ray has started its process."""
        self.now = True

    def on_trial_complete(self, *_: Any, **__: Any) -> None:
        """The next one waits for a place of its own."""
        self.now = False

    def on_trial_error(self, *_: Any, **__: Any) -> None:
        """The same, after its last process was killed."""
        self.now = False

    def on_trial_recover(self, *_: Any, **__: Any) -> None:
        """The same, for another process of the same trial."""
        self.now = False


def trainable(parameters: dict[str, Any]) -> dict[str, Any]:
    """What Ray Tune runs in a process of its own."""
    row = run(parameters["request"])
    return {"tokens_per_second": row.tokens_per_second or 0.0, "outcome": row.outcome}


def drive(proposals: Proposals, folder: Path, resources: dict[str, float]) -> None:
    """Run trials until the strategy has no more, or until Ctrl-C, which Tune takes between two events."""
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # its console prints a box of its own even when silenced
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # CSV and JSON copies of the rows
    placed = Placed()
    with ray_files(folder) as place, placing("a trial", [resources], lambda: placed.now or not proposals.running):
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
                storage_path=str(folder),
                failure_config=ray.tune.FailureConfig(max_failures=RETRIES),
                verbose=0,
                callbacks=[placed],
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
