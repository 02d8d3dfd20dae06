"""The final run of a search's winner, which ``best.json`` describes, and the loss that is predicted for it."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from infra.cli.units import format_duration
from infra.schema import to_json
from train.config import Cycle, ResolvedConfig
from train.result import LossPrediction
from train.search_reference import SearchReference
from tune.learning.plan import LearningSearch
from tune.learning.results import CandidateResult, LearningResults
from tune.trial.row import TrialRow

MAX_VALIDATION_FRACTION = 0.03
"""Maximum fraction of the final run's time for validation, which takes a third of training on as many tokens."""
SLOPE_RATIO = 0.8
"""Ratio to the full time at which the loss is computed for the slope at the full time."""


def final_run(search: LearningSearch, results: LearningResults, winner: CandidateResult) -> ResolvedConfig:
    """Return the config of the final run: the winner's settings, a time, and validation as in the search.

    The time is --train-time or, with --target-loss, the upper end of the interval of the winner's time to this loss.
    """
    config = search.final_config(search.space.config(winner.candidate), winner.speed.middle)
    config = config.replace(steps=None, tokens=None, time_budget=final_seconds(results, winner))
    if config.duration.cycle.val_batches is not None:
        return config
    return config.replace(cycle=_cycle(config, search.val_windows, winner.speed.middle))


def final_seconds(results: LearningResults, winner: CandidateResult) -> float:
    """Return the time of the final run in whole seconds."""
    reached = None if results.target_loss is None else winner.seconds(results.target_loss)
    if reached is None or math.isinf(reached.middle):
        return results.train_time
    return float(math.ceil(reached.middle if math.isinf(reached.high) else reached.high))


def _cycle(config: ResolvedConfig, val_windows: int, tokens_per_second: float) -> Cycle:
    """Return a cycle that validates on the search's windows, and is long enough for validation to take little time."""
    val_seconds = val_windows * config.model.context_length / (3 * tokens_per_second)
    seconds = max(config.duration.cycle.seconds, round(val_seconds / MAX_VALIDATION_FRACTION))
    seconds = min(seconds, config.duration.time_budget or seconds)
    return Cycle.parse(f"{format_duration(seconds)}+{math.ceil(val_windows / config.batch.global_batch)}")


def best_json(
    search: LearningSearch, rows: Sequence[TrialRow], results: LearningResults, winner: CandidateResult
) -> dict[str, Any]:
    """Create the content of best.json: the config of the final run, and what was measured and predicted for it."""
    config = final_run(search, results, winner)
    prediction = predict_loss(search, winner, config)
    return {
        "space": f"learning, {search.space.label(winner.candidate)}",
        "config": config.to_json(),
        "measured": to_json(replace(
            _speed_reference(search, rows, winner, config), loss_prediction=prediction,
            tied_with=[search.space.label(result.candidate) for result in results.finalists if results.is_tied(result)],
        )),
    }  # fmt: skip


def _speed_reference(
    search: LearningSearch, rows: Sequence[TrialRow], winner: CandidateResult, config: ResolvedConfig
) -> SearchReference:
    """Return the measurements of the trials that measured the winner's speed, or of its own if there are none.

    It has the speeds of the other candidates, too; the winner's final run has the ``config``.
    """
    key = search.space.speed_key(winner.candidate)
    measured = [row for row in rows if row.result]
    of_speed = [row for row in measured if row.stage == "speed" and search.space.speed_key(row.candidate) == key]
    own = of_speed or [row for row in measured if row.candidate == winner.candidate]
    memory = max((row.memory for row in own if row.memory), default=None)
    results = [row.result for row in own if row.result]
    others = [(search.space.config(row.candidate), row.speed) for row in rows if row.stage == "speed" and row.speed]
    return SearchReference.of(search.directory.name, winner.speed, memory, results).with_speeds(config, others)


def predict_loss(search: LearningSearch, winner: CandidateResult, config: ResolvedConfig) -> LossPrediction | None:
    """Predict the loss at the end of the run of ``config``; None if the winner's rungs are too few."""
    seconds = config.duration.time_budget
    assert seconds is not None, "the final run has a time"
    loss, earlier = winner.loss(seconds), winner.loss(SLOPE_RATIO * seconds)
    if loss is None:
        return None
    slope = (loss.middle - earlier.middle) / math.log(1 / SLOPE_RATIO) if earlier else 0.0
    return LossPrediction(
        *loss, train_tokens=max(1, int(winner.speed.middle * seconds)), slope=slope, val_windows=search.val_windows,
        data_fingerprint=search.manifest.fingerprint,
    )  # fmt: skip
