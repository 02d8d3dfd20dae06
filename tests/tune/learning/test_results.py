"""The rows of a search become losses, times and differences with intervals, and a winner or a tie."""

import math
from dataclasses import replace

import pytest
from learning_rows import SPEED, TRAIN_TIME, candidate, final_rows, law_loss, learning_row

from train.intervals import Estimate
from tune.learning.results import LearningResults, learning_results
from tune.space import Candidate
from tune.trial.row import TrialRow

CONTROL, BEST, CLOSE, STOPPED = candidate(3e-4), candidate(1e-3), candidate(2e-3), candidate(1e-2)
EXACT = Estimate(SPEED, SPEED, SPEED)
ROWS = [
    *(learning_row(who, level) for who, level in ((CONTROL, 2.0), (BEST, 1.7), (CLOSE, 1.701))),
    learning_row(STOPPED, 2.4, (100,), outcome="pruned"),
    *final_rows(CONTROL, 2.0), *final_rows(BEST, 1.7), *final_rows(CLOSE, 1.701),
]  # fmt: skip


def results_of(
    rows: list[TrialRow], speed: Estimate = EXACT, train_time: float = TRAIN_TIME, target: float | None = None
) -> LearningResults:
    return learning_results(rows, CONTROL, lambda candidate: speed, train_time, target)


def ranked(results: LearningResults) -> list[Candidate]:
    return [result.candidate for result in results.candidates]


def test_finalists_come_first_and_stopped_candidates_last() -> None:
    results = results_of(ROWS)
    assert ranked(results) == [BEST, CLOSE, CONTROL, STOPPED]
    assert [result.candidate for result in results.finalists] == [BEST, CLOSE, CONTROL]
    best = results.candidates[0]
    assert best.longest_rung == 1600
    assert len(best.longest_losses) == 3
    assert best.longest_loss == pytest.approx(law_loss(1600, 1.7))
    assert results.candidates[-1].is_stopped


def test_a_steep_curve_does_not_win_by_its_extrapolation() -> None:
    """Recorded losses: the plateau that a model has just left makes the law of its rungs fall too far."""
    times = [100.0 * 2**n for n in range(2, 5)]
    recorded = {BEST: ((4.412, 4.141, 4.009), 3.893), CLOSE: ((4.937, 4.440, 4.110), 3.949)}
    rows = [
        replace(row, rungs=[replace(rung, loss=loss) for rung, loss in zip(row.rungs, losses, strict=True)])
        for who, (losses, _) in recorded.items()
        for row in [learning_row(who, 1.0, times, "final")]
    ]
    results = results_of(rows)
    assert ranked(results) == [BEST, CLOSE]
    best, close = (result.loss(TRAIN_TIME) for result in results.candidates)
    assert best
    assert close
    assert close.middle < best.middle
    assert best.low < recorded[BEST][1] < best.high
    assert close.low < recorded[CLOSE][1] < close.high
    front = results.best_at(TRAIN_TIME)
    assert front
    assert front.candidate == BEST


def test_the_prediction_at_the_full_time_holds_the_law() -> None:
    winner = results_of(ROWS).winner
    assert winner
    loss = winner.loss(TRAIN_TIME)
    assert loss
    assert loss.low < law_loss(TRAIN_TIME, 1.7) < loss.high
    assert loss.middle == pytest.approx(law_loss(TRAIN_TIME, 1.7), abs=0.01)


def test_seeds_in_pairs_show_a_difference_that_is_smaller_than_a_runs_scatter() -> None:
    results = results_of(ROWS)
    winner, close, control, _ = results.candidates
    difference = results.difference(winner, control, TRAIN_TIME)
    assert difference
    assert difference.high < 0
    assert difference.middle == pytest.approx(law_loss(TRAIN_TIME, 1.7) - law_loss(TRAIN_TIME, 2.0), abs=0.01)
    assert results.is_tied(close)
    assert not results.is_tied(control)
    assert not results.is_tied(winner)


def test_a_noisy_speed_widens_times_losses_and_differences() -> None:
    exact, noisy = results_of(ROWS), results_of(ROWS, Estimate(SPEED, 0.8 * SPEED, 1.3 * SPEED))

    def ratio(results: LearningResults) -> float:
        winner = results.winner
        assert winner
        time = winner.seconds(3.0)
        assert time
        return time.high / time.low

    assert ratio(noisy) > 1.5
    assert ratio(noisy) > ratio(exact)

    def width(results: LearningResults, seconds: float) -> float:
        assert results.winner
        loss = results.winner.loss(seconds)
        assert loss
        return loss.high - loss.low

    assert exact.winner
    longest_rung = exact.winner.longest_rung
    assert width(noisy, longest_rung) > 1.5 * width(exact, longest_rung)
    assert width(noisy, TRAIN_TIME) > width(exact, TRAIN_TIME)


def test_an_error_of_a_common_speed_cancels_out_in_differences() -> None:
    noisy = Estimate(SPEED, 0.5 * SPEED, 2 * SPEED)
    common = results_of(ROWS, noisy)
    other = learning_results(ROWS, CONTROL, lambda who: noisy if who == BEST else EXACT, TRAIN_TIME)

    def width(results: LearningResults) -> float:
        winner, control = results.winner, results.control
        assert winner
        assert control
        difference = results.difference(winner, control, TRAIN_TIME)
        assert difference
        return difference.high - difference.low

    assert width(other) > 2 * width(common)


def test_twice_the_speed_halves_no_measured_time() -> None:
    """The rungs of a candidate are in seconds of its own final run."""
    fast = results_of(ROWS, Estimate(2 * SPEED, 2 * SPEED, 2 * SPEED)).winner
    slow = results_of(ROWS).winner
    assert fast
    assert slow
    assert fast.seconds(3.0) == slow.seconds(3.0)


def test_a_target_ranks_by_the_time_to_it() -> None:
    # The first one is better early, the second one at the end, as a small and a large batch.
    early, late = candidate(1e-3, 8), candidate(1e-3, 64)
    times = [100.0 * 2**n for n in range(5)]

    def row(who: Candidate, floor: float, level: float) -> TrialRow:
        trial = learning_row(who, level, times, "final")
        return replace(trial, rungs=[replace(r, loss=law_loss(r.seconds, level, floor)) for r in trial.rungs])

    rows = [row(early, 2.6, 0.9), row(late, 2.0, 1.9)]
    assert ranked(results_of(rows)) == [late, early]
    assert ranked(results_of(rows, target=3.2)) == [early, late]
    results = results_of(rows, target=3.2)
    assert results.goal_time < 500
    assert [best.candidate for time in (100, 3200) if (best := results.best_at(time))] == [early, late]


def test_a_target_below_the_floor_of_every_candidate_is_out_of_reach() -> None:
    assert results_of(ROWS, target=0.3).is_target_out_of_reach
    assert not results_of(ROWS, target=3.0).is_target_out_of_reach
    assert not results_of(ROWS).is_target_out_of_reach


def test_a_candidate_that_failed_cannot_win() -> None:
    rows = [*ROWS, learning_row(BEST, 1.0, (400, 800, 1600), "final", 2, "failed", "diverged")]
    results = results_of(rows)
    assert ranked(results)[0] == CLOSE
    assert ranked(results)[-1] == BEST


def test_a_single_rung_at_the_full_time_needs_no_law() -> None:
    levels = ((CONTROL, 2.0), (BEST, 1.7))
    rows = [learning_row(who, level, (TRAIN_TIME,), "final", seed) for seed in range(3) for who, level in levels]
    results = results_of(rows)
    winner, control = results.candidates
    assert winner.candidate == BEST
    loss, difference = winner.loss(TRAIN_TIME), results.difference(winner, control, TRAIN_TIME)
    assert loss
    assert difference
    assert loss.middle == pytest.approx(law_loss(TRAIN_TIME, 1.7))
    assert loss.low < loss.middle < loss.high
    assert difference.high < 0
    assert winner.loss(2 * TRAIN_TIME) is None


def test_round_losses_are_few_and_end_above_the_prediction() -> None:
    results = results_of(ROWS)
    losses = results.round_losses()
    assert results.winner
    lowest = results.winner.loss(TRAIN_TIME)
    assert lowest
    assert 4 <= len(losses) <= 7
    assert losses == sorted(losses, reverse=True)
    assert lowest.middle <= losses[-1] < losses[0] < 4.0
    assert 2.77 in results_of(ROWS, target=2.77).round_losses()


def test_without_rows_there_is_no_winner() -> None:
    results = results_of([])
    assert results.winner is None
    assert results.finalists == results.round_losses() == []
    assert results.best_at(100.0) is None
    assert math.isclose(results.goal_time, TRAIN_TIME)


def test_losses_on_the_plateau_are_left_out_of_a_law_but_not_their_candidate() -> None:
    """A model first learns the frequencies of tokens with any settings, which says nothing of how it goes on."""

    def unlearned(row: TrialRow, count: int) -> TrialRow:
        rungs = [replace(rung, loss=5.3, has_learned=False) for rung in row.rungs[:count]]
        return replace(row, rungs=[*rungs, *row.rungs[count:]])

    rows = [learning_row(CONTROL, 2.0), unlearned(learning_row(BEST, 1.7, (100, 200, 400, 800)), 1)]
    best = results_of(rows).candidates[0]
    assert best.candidate == BEST
    assert [time for time, _ in best.curves[0]] == [200, 400, 800]
    stuck = unlearned(learning_row(CLOSE, 1.7), 3)
    late = unlearned(learning_row(BEST, 1.7), 2)
    results = results_of([stuck, late])
    assert ranked(results) == [BEST, CLOSE], "one learned rung counts more than a law of losses on the plateau"
    assert not results.candidates[-1].has_learned
    assert results.candidates[-1].longest_loss == 5.3
