"""What a search for the lowest loss tries next, and what Ray Tune's ASHA stops, on losses by a known law."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from ray.tune.experiment import Trial
from trial_rows import trial_row

from infra.device.hardware import cpu_info
from train.config import TrainConfig
from train.intervals import Estimate
from train.model_config import parse_model
from tune.experiment.ray_tune import LOSS_METRIC, TIME_METRIC
from tune.learning.scheduler import make_scheduler
from tune.learning.space import LearningSpace, make_learning_space
from tune.learning.strategy import FINALISTS, REPEATED_FINALISTS, SEEDS, LearningStrategy, final_seeds
from tune.space import Candidate
from tune.trial.row import Proposal, RungLoss, TrialRow

TIME = 3200.0
RATES, BATCHES = (1e-3, 2e-3, 4e-3, 8e-3), (4, 8, 16, 32)


@pytest.fixture(scope="module")
def space() -> LearningSpace:
    training = TrainConfig.of(model=parse_model("tiny"), device="cpu", learning_rate=1e-3, global_batch=32)
    knobs = [f"learning_rate={','.join(map(str, RATES))}", f"global_batch={','.join(map(str, BATCHES))}"]
    return make_learning_space(training, knobs, cpu_info())


def loss_at(candidate: Candidate, seconds: float, seed: int = 0) -> float:
    """A bowl around the rate 0.004 and the batch 8, on a power law of time, with a little scatter of seeds."""
    rate, batch = (dict(candidate.knobs)[name] for name in ("learning_rate", "global_batch"))
    distance = math.log2(rate / 4e-3) ** 2 + math.log2(batch / 8) ** 2
    return 2.5 + (1 + 0.1 * distance) * 4 * seconds**-0.15 + 0.001 * math.sin(7 * seed + distance)


Row = Callable[[LearningStrategy, Proposal, int], TrialRow]


def row_of(strategy: LearningStrategy, proposal: Proposal, number: int, **changes: Any) -> TrialRow:
    """The row of a trial that nothing stops."""
    candidate, stage = proposal.candidate, proposal.stage
    times = [] if stage == "speed" else strategy.rung_seconds(stage, proposal.round)
    rungs = [RungLoss(seconds, 0, loss_at(candidate, seconds, proposal.round)) for seconds in times]
    identity = (str(number), number, stage, proposal.round, candidate, 1, "ok", "", changes.pop("seconds", 1.0))
    speed = {"tokens_per_second": 1000.0} if stage == "speed" else {}
    return replace(trial_row(*identity, node="here", **speed), rungs=rungs, **changes)


def search(strategy: LearningStrategy, run: Row = row_of) -> list[TrialRow]:
    rows: list[TrialRow] = []
    while proposal := strategy.propose(rows):
        rows.append(run(strategy, proposal, len(rows) + 1))
    return rows


def test_the_search_climbs_to_the_best_and_ends_with_finals_in_turn(space: LearningSpace) -> None:
    strategy = LearningStrategy(space, TIME)
    rows = search(strategy)
    stages = [row.stage for row in rows]
    assert rows[1].candidate == space.control
    best = strategy.best(rows)
    assert best
    assert dict(best.knobs) == {"learning_rate": 4e-3, "global_batch": 8}
    assert stages.count("learn") < len(space.candidates), "the far corner is never tried"
    assert stages.count("speed") == len({dict(row.candidate.knobs)["global_batch"] for row in rows})
    first_final = stages.index("final")
    assert set(stages[first_final:]) == {"final"}
    finalists, repeated = strategy.finalists(rows), strategy.repeated_finalists(rows)
    assert len(finalists) == FINALISTS + 1
    assert best in finalists
    assert finalists[-1] == repeated[-1] == space.control
    assert len(repeated) in (2, REPEATED_FINALISTS + 1), "a second one only if it may be as good"
    rounds = [[row.candidate for row in rows[first_final:] if row.round == seed] for seed in range(SEEDS)]
    assert rounds == [finalists, repeated[::-1], repeated]
    assert len(rows[first_final:]) <= len(final_seeds(len(space.candidates)))
    lengths = {stage: max(row.rungs[-1].seconds for row in rows if row.stage == stage) for stage in ("learn", "final")}
    assert lengths == {"learn": TIME / 8, "final": TIME / 2}


def test_each_optimizer_is_climbed_to_its_own_best() -> None:
    """The best one of all is worse at the settings that are the best for the other optimizer, and near them."""
    training = TrainConfig.of(model=parse_model("tiny"), device="cpu", learning_rate=1e-3, global_batch=4)
    knobs = [f"{name}={','.join(map(str, v))}" for name, v in (("learning_rate", RATES), ("global_batch", BATCHES))]
    space = make_learning_space(training, [*knobs, "optimizer=adamw-fused,muon"], cpu_info())

    def learned(strategy: LearningStrategy, proposal: Proposal, number: int) -> TrialRow:
        row, settings = row_of(strategy, proposal, number), dict(proposal.candidate.knobs)
        rate, batch, lowest = (8e-3, 32, 0.97) if settings["optimizer"] == "muon" else (1e-3, 4, 1.0)
        steps = abs(math.log2(settings["learning_rate"] / rate)) + abs(math.log2(settings["global_batch"] / batch))
        factor = lowest + 0.02 * steps
        return replace(row, rungs=[replace(rung, loss=factor * (2.5 + 4 * rung.seconds**-0.15)) for rung in row.rungs])

    strategy = LearningStrategy(space, TIME)
    rows = search(strategy, learned)
    best = strategy.best(rows)
    assert best
    assert dict(best.knobs) == {"learning_rate": 8e-3, "global_batch": 32, "optimizer": "muon"}
    assert sum(row.stage == "learn" for row in rows) < len(space.candidates)


def test_a_seed_counts_once_all_repeated_finalists_have_it(space: LearningSpace) -> None:
    """Until then a candidate with more seeds would be compared with one that has fewer."""
    strategy = LearningStrategy(space, TIME)
    rows = search(strategy)
    repeated = strategy.repeated_finalists(rows)
    first_repetition = next(number for number, row in enumerate(rows) if row.stage == "final" and row.round)
    for count in range(first_repetition, len(rows) + 1):
        results = strategy.results(rows[:count])
        seeds = {len(result.curves) for result in results.candidates if result.candidate in repeated}
        assert seeds == {1 + (count - first_repetition) // len(repeated)}


def test_a_control_that_was_stopped_is_a_finalist(space: LearningSpace) -> None:
    def run(strategy: LearningStrategy, proposal: Proposal, number: int) -> TrialRow:
        row = row_of(strategy, proposal, number)
        is_stopped = proposal.stage == "learn" and proposal.candidate == space.control
        return replace(row, outcome="pruned", rungs=row.rungs[:1]) if is_stopped else row

    finals = [row for row in search(LearningStrategy(space, TIME), run) if row.stage == "final"]
    assert space.control in [row.candidate for row in finals if row.round == 0]
    assert {row.round for row in finals if row.candidate == space.control} == set(range(SEEDS))


def test_a_trial_that_measures_a_speed_precedes_the_first_candidate_of_each(space: LearningSpace) -> None:
    strategy, known = LearningStrategy(space, TIME), set[object]()
    for row in search(strategy):
        key = space.speed_key(row.candidate)
        assert (row.stage == "speed") == (key not in known)
        known.add(key)


def test_candidates_without_a_speed_are_left_out(space: LearningSpace) -> None:
    """Their batch does not fit, for example."""

    def run(strategy: LearningStrategy, proposal: Proposal, number: int) -> TrialRow:
        row = row_of(strategy, proposal, number)
        fits = dict(row.candidate.knobs)["global_batch"] != 16
        return row if fits else replace(row, outcome="oom", result=None, rungs=[])

    rows = search(LearningStrategy(space, TIME), run)
    without = [row for row in rows if dict(row.candidate.knobs)["global_batch"] == 16]
    assert [row.stage for row in without] == ["speed"]
    assert any(row.stage == "final" for row in rows)


def test_a_speed_that_was_not_measured_in_time_is_measured_again_once(space: LearningSpace) -> None:
    strategy = LearningStrategy(space, TIME)
    short = replace(row_of(strategy, Proposal(space.control, "speed"), 1), result=None, ended_too_early=True)
    assert strategy.propose([short]) == Proposal(space.control, "speed", round=1)
    again = strategy.propose([short, replace(short, round=1)])
    assert again
    assert space.speed_key(again.candidate) != space.speed_key(space.control)


def test_a_finalist_that_fails_runs_no_more(space: LearningSpace) -> None:
    def run(strategy: LearningStrategy, proposal: Proposal, number: int) -> TrialRow:
        row = row_of(strategy, proposal, number)
        fails = proposal.stage == "final" and proposal.candidate == space.control
        return replace(row, outcome="failed", rungs=[]) if fails else row

    finals = [row for row in search(LearningStrategy(space, TIME), run) if row.stage == "final"]
    assert sum(row.candidate == space.control for row in finals) == 1
    assert {row.round for row in finals if row.candidate != space.control} == set(range(SEEDS))


def test_the_time_of_the_search_ends_its_exploration(space: LearningSpace) -> None:
    long = search(LearningStrategy(space, TIME))
    short = search(LearningStrategy(space, TIME, search_time=8.0))
    explored = [sum(row.stage == "learn" for row in rows) for rows in (long, short)]
    assert explored[1] < explored[0]
    finals = [row for row in short if row.stage == "final"]
    assert {row.round for row in finals} == set(range(SEEDS))


def test_the_search_begins_at_the_noise_scale(space: LearningSpace) -> None:
    """The second candidate has the batch nearest to it, and the other settings of the control."""

    def run(strategy: LearningStrategy, proposal: Proposal, number: int) -> TrialRow:
        return row_of(strategy, proposal, number, noise_scale=Estimate(9.0, 5.0, 20.0))

    learned = [row for row in search(LearningStrategy(space, TIME), run) if row.stage == "learn"]
    assert dict(learned[1].candidate.knobs) == {"learning_rate": 1e-3, "global_batch": 8}


def test_two_trials_at_a_time_do_not_repeat_each_other(space: LearningSpace) -> None:
    strategy = LearningStrategy(space, TIME)
    rows = [
        row_of(strategy, Proposal(space.control, "speed"), 1),
        row_of(strategy, Proposal(space.control, "learn"), 2),
    ]
    first = strategy.propose(rows)
    assert first
    running = trial_row("3", 3, first.stage, 0, first.candidate, 1, "ok", "running", 0.0, node="there")
    second = strategy.propose([*rows, running])
    assert second
    assert second.candidate != first.candidate


def decisions(rows: Sequence[TrialRow], losses: Sequence[float]) -> list[str]:
    """What ASHA decides about a new trial with these losses at the first rungs."""
    scheduler, controller, trial = make_scheduler(TIME, rows), None, Trial("new", trial_id="new", stub=True)
    scheduler.on_trial_add(controller, trial)  # type: ignore[arg-type]
    times = [TIME / 16, TIME / 8, TIME / 4]
    return [
        scheduler.on_trial_result(controller, trial, {TIME_METRIC: time, LOSS_METRIC: loss})  # type: ignore[arg-type]
        for time, loss in zip(times, losses, strict=False)
    ]


def test_a_trial_above_the_median_at_its_rung_is_stopped(space: LearningSpace) -> None:
    """The losses of trials before a restart count; those of models that have learned nothing yet are the highest."""
    proposals = [Proposal(candidate, "learn") for candidate in space.candidates[:3]]
    strategy = LearningStrategy(space, TIME)
    rows = [
        replace(row_of(strategy, proposal, n), rungs=[RungLoss(TIME / 16, 0, loss)])
        for n, (proposal, loss) in enumerate(zip(proposals, (4.0, 4.2, 4.4), strict=True))
    ]
    assert decisions(rows, [4.1, 9.9]) == ["CONTINUE", "CONTINUE"], "the first trial at a rung continues"
    assert decisions(rows, [4.3]) == ["STOP"]
    unlearned = [replace(row, rungs=[replace(row.rungs[0], has_learned=False)]) for row in rows]
    assert decisions(unlearned, [4.3]) == ["CONTINUE"]


def test_a_trial_on_the_plateau_is_stopped_once_half_of_the_others_have_left_it(space: LearningSpace) -> None:
    """Until then, settings look alike, however their losses scatter."""
    strategy = LearningStrategy(space, TIME)

    def row(number: int, *, has_learned: bool) -> TrialRow:
        proposal = Proposal(space.candidates[number], "learn")
        rung = RungLoss(TIME / 16, 0, 5.0 - number / 10, has_learned)
        return replace(row_of(strategy, proposal, number), rungs=[rung])

    on_plateau = RungLoss(TIME / 16, 0, 5.3, has_learned=False).comparable_loss
    plateau = [row(number, has_learned=False) for number in range(3)]
    assert decisions(plateau, [on_plateau]) == ["CONTINUE"]
    assert decisions([*plateau, row(3, has_learned=True)], [on_plateau]) == ["CONTINUE"]
    assert decisions([row(number, has_learned=True) for number in range(3)], [on_plateau]) == ["STOP"]
