"""The introduction of a search for the lowest loss, and the plan that a dry run prints."""

from collections import Counter
from typing import NamedTuple

from infra.cli.console import console
from infra.cli.table import bullet_list
from infra.cli.units import format_count, format_duration
from train.config import ResolvedConfig
from train.data.assumed import describe_data
from train.estimate.gpu_rates import GpuRates, load_gpu_rates
from train.estimate.prediction import Prediction, merge_changes, predict, prediction_table
from train.estimate.roofline import SOURCE
from tune.learning.plan import LearningSearch, describe_knobs
from tune.learning.report import goal
from tune.learning.strategy import SEEDS, final_seeds
from tune.learning.text import format_time
from tune.reporting.report import COMPILE_SECONDS, MAX_PLAN_ROWS, START_SECONDS, format_cost, format_limit
from tune.space import KnobValues
from tune.trial.row import Stage

SCHEDULES = {
    "wsd": "schedule wsd: the learning rate is constant, and falls to zero over the last fifth of the run",
    "constant": "schedule constant: the learning rate does not fall",
    "cosine": "schedule cosine: a trial has one rung, because the learning rate depends on the length of the run",
}
"""Descriptions of schedules and of their effect on trials."""


def introduce_learning(search: LearningSearch) -> None:
    """Print the size of the search, its control, its held-out windows and, for a dry run, the plan."""
    config, control = search.config, search.training
    machines = f" of {', '.join(machine.name for machine in search.machines)}" if config.cluster else ""
    limit, count = format_limit(search.limit, config.memory_limit), len(search.space.candidates)
    console.print(
        f"[bold]{config.training.model.text}[/bold]: {format_count(count, 'candidate')} for the {goal(search)}, "
        f"limit {limit} per process, on {search.device}{machines}"
    )
    console.print(f"knobs: {describe_knobs(search.space)}", markup=False)
    console.print(f"control: {search.space.label(search.space.control)}; {describe_schedule(control)}", markup=False)
    rungs = ", ".join(map(format_time, search.strategy.rung_seconds("learn")))
    longest = format_time(search.strategy.rung_seconds("final")[-1])
    console.print(
        f"rungs: {rungs}; finalists {longest} of the final run's {format_duration(search.train_time)}, the best with "
        f"{SEEDS} seeds; validated on {format_count(search.val_windows, 'held-out window')}",
        markup=False,
    )
    if search.manifest.fingerprint and search.manifest.splits["val"]["books"] == 1:
        console.print(
            "warning: the data have one held-out book, so that the winner may be the best for this book only; tokenize "
            "more books, or with a larger --val-fraction",
            style="yellow", markup=False,
        )  # fmt: skip
    if config.dry_run:
        print_plan(search)


def describe_schedule(control: ResolvedConfig) -> str:
    """Describe the learning-rate schedule with its warm-up."""
    optimization = control.optimization
    warmup = format_count(optimization.warmup_steps, "step")
    return f"{SCHEDULES[optimization.schedule]}; warm-up of at most {warmup}"


def print_plan(search: LearningSearch) -> None:
    """Print the predicted speeds of the candidates, and the trials with their time and cost."""
    config = search.config
    console.print(describe_data(search.manifest, search.training.model, config.training.dataset.source), markup=False)
    gpu_rates = load_gpu_rates(config.gpu) if config.gpu else None
    predictions = predict_speeds(search, gpu_rates)
    title = f"Candidates by speed{f' on {gpu_rates.device_info.name}' if gpu_rates else ''}, predicted, not measured"
    prediction_table(title, "settings", predictions[:MAX_PLAN_ROWS]).show()
    notes = [SOURCE if gpu_rates else "speeds are only predicted with --gpu"]
    if (hidden := len(predictions) - MAX_PLAN_ROWS) > 0:
        notes.append(f"{hidden} more rows")
    speeds = [prediction.speed for prediction in predictions if prediction.speed]
    tokens = search.manifest.splits["train"]["tokens"]
    if speeds:
        ends = (min(speed.low for speed in speeds), max(speed.high for speed in speeds))
        epochs = " to ".join(f"{speed * search.train_time / tokens:.2g}" for speed in ends)
        notes.append(f"{format_duration(search.train_time)} of training is {epochs} epochs of the data")
    console.print_paragraph(bullet_list([*notes, plan_note(search)]))
    console.print("dry run: nothing was run")


def predict_speeds(search: LearningSearch, gpu_rates: GpuRates | None) -> list[Prediction]:
    """Predict the speed and memory of each group of candidates that have the same speed."""
    space = search.space
    groups: dict[KnobValues, Prediction] = {}
    for candidate in space.candidates:
        key = space.speed_key(candidate)
        if key not in groups:
            label = " ".join(f"{name}={value}" for name, value in key) or "all"
            groups[key] = predict(label, space.config(candidate).step, gpu_rates, search.limit)
    return merge_changes(groups.values())


class PlannedTrial(NamedTuple):
    """A trial of a plan."""

    stage: Stage
    seed: int = 0


def planned_trials(search: LearningSearch) -> list[PlannedTrial]:
    """Return the trials of a search that tries all of its candidates."""
    space, strategy = search.space, search.strategy
    speeds = {space.speed_key(candidate) for candidate in space.candidates} - strategy.known_speeds.keys()
    trials = [PlannedTrial("speed") for _ in speeds]
    trials += [PlannedTrial("learn") for _ in space.candidates]
    return trials + [PlannedTrial("final", seed) for seed in final_seeds(len(space.candidates))]


def plan_note(search: LearningSearch) -> str:
    """Return the maximum number of trials, and their maximum time and cost."""
    trials = planned_trials(search)
    startup = START_SECONDS + COMPILE_SECONDS[search.training.execution.compile]
    total = sum(startup + search.trial_seconds(*trial) for trial in trials)
    counts = Counter(trial.stage for trial in trials)
    text = (
        f"at most {len(trials)} trials: {counts['speed']} of speed, {counts['learn']} that learn, of which ASHA stops "
        f"the slower ones, and {counts['final']} of the finalists and the control"
    )
    if search.config.search_time is not None:
        text += f"; no further candidate after half of --search-time {format_duration(search.config.search_time)}"
    return f"{text}; at most {format_time(total)} in total{format_cost(total, search.config.price)}"
