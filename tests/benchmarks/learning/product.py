"""This project's search for the lowest loss as a competitor: its own strategy and scheduler, on recorded losses."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import TrialScheduler
from replay import Cell, Session

from infra.device.hardware import cpu_info
from train.config import TrainConfig
from train.intervals import Estimate
from train.model_config import parse_model
from tune.experiment.ray_tune import LOSS_METRIC, TIME_METRIC
from tune.learning.scheduler import make_scheduler
from tune.learning.space import make_learning_space
from tune.learning.strategy import LearningStrategy
from tune.space import Candidate
from tune.trial.learning import LEARNED_FRACTION
from tune.trial.row import Proposal, RungLoss, TrialRow

SPEED_TRIAL_FRACTION = 0.005
"""Assumed time of a trial that measures a speed, as a fraction of the final run's."""


@dataclass(frozen=True)
class RecordedStrategy(LearningStrategy):
    """The strategy on a grid whose speeds are known. Their trials are charged when the search begins."""

    def speed(self, candidate: Candidate, rows: Sequence[TrialRow]) -> Estimate:
        return Estimate(1.0, 1.0, 1.0)


def this_search(session: Session, draw: random.Random, control: Cell) -> Mapping[int, Cell]:
    """Run the search from the settings of ``control``, and return its choice for every duration."""
    grid = session.grid
    axes = {name: sorted({getattr(cell, name) for cell in grid.cells}) for name in vars(control)}
    knobs = [f"{name}={','.join(map(str, values))}" for name, values in axes.items()]
    training = TrainConfig.of(model=parse_model("tiny"), device="cpu", micro_batch=1, **vars(control))
    space = make_learning_space(training, knobs, cpu_info())
    strategy = RecordedStrategy(space, grid.full_seconds)
    session.seconds += SPEED_TRIAL_FRACTION * grid.full_seconds * len(grid.speeds)
    rows: list[TrialRow] = []
    while proposal := strategy.propose(rows):
        rows.append(run(session, strategy, proposal, rows))
    results, full = strategy.results(rows), grid.full_seconds
    times = [grid.rungs[duration] * full for duration in session.durations]
    chosen = [results.winner if time == full else results.best_at(time) for time in times]
    return {duration: cell_of(best.candidate) for duration, best in zip(session.durations, chosen, strict=True) if best}


def run(session: Session, strategy: LearningStrategy, proposal: Proposal, rows: Sequence[TrialRow]) -> TrialRow:
    """Run a trial on the recorded losses, which ASHA may stop, and return its row."""
    grid, cell = session.grid, cell_of(proposal.candidate)
    seed = grid.seeds[(grid.seeds.index(session.seed) + proposal.round) % len(grid.seeds)]
    scheduler = make_scheduler(grid.full_seconds, rows)
    controller: Any = None  # ASHA does not use it.
    number = len(rows) + 1
    trial: Any = Trial("learned", trial_id=str(number), stub=True)
    scheduler.on_trial_add(controller, trial)
    rungs: list[RungLoss] = []
    outcome = "ok"
    for seconds in strategy.rung_seconds(proposal.stage, proposal.round):
        rung = min(range(len(grid.rungs)), key=lambda n: abs(grid.rungs[n] * grid.full_seconds - seconds))
        loss = session.train(cell, rung, seed)
        if loss == math.inf:
            outcome = "failed"
            break
        rungs.append(RungLoss(seconds, 0, loss, loss < LEARNED_FRACTION * grid.entropy))
        result = {TIME_METRIC: seconds, LOSS_METRIC: rungs[-1].comparable_loss}
        if proposal.stage == "final":
            continue
        if scheduler.on_trial_result(controller, trial, result) == TrialScheduler.STOP:
            outcome = "pruned"
            break
    identity = (str(number), number, proposal.stage, proposal.round, proposal.candidate)
    return TrialRow(*identity, 1, outcome, "", 0.0, node="", rungs=rungs)


def cell_of(candidate: Candidate) -> Cell:
    """Return the grid's cell of ``candidate``."""
    return Cell(**dict(candidate.knobs))
