"""Ray Tune's ASHA, which stops the slower learners of a search for the lowest loss."""

from collections.abc import Sequence
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler, TrialScheduler

from tune.experiment.ray_tune import LOSS_METRIC, TIME_METRIC
from tune.learning.strategy import EXPLORED_FRACTION, FIRST_FRACTION
from tune.trial.row import TrialRow


def make_scheduler(train_time: float, rows: Sequence[TrialRow]) -> TrialScheduler:
    """Create Ray Tune's ASHA, which stops a learning trial whose loss at a rung is above the median so far.

    A model that has not learned more than the frequencies of tokens is stopped only if more than half of the others
    have: until then all settings look alike. ASHA knows the losses in ``rows``, so that a search that was killed
    decides as if it had not been.
    """
    scheduler = ASHAScheduler(
        time_attr=TIME_METRIC, metric=LOSS_METRIC, mode="min", grace_period=FIRST_FRACTION * train_time,  # type: ignore[arg-type]
        max_t=EXPLORED_FRACTION * train_time, reduction_factor=2, stop_last_trials=False,  # type: ignore[arg-type]
    )  # fmt: skip
    for row in rows:
        if row.stage != "learn":
            continue
        trial = Trial("learned", trial_id=row.key, stub=True)
        controller: Any = None  # ASHA does not use it.
        scheduler.on_trial_add(controller, trial)
        for rung in row.rungs:
            scheduler.on_trial_result(controller, trial, {TIME_METRIC: rung.seconds, LOSS_METRIC: rung.comparable_loss})
    return scheduler
