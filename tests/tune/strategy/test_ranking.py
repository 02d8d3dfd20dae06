"""Who wins: confirmed speed, ties by interval, the smaller memory among equals, never what broke the limit."""

from dataclasses import replace

import pytest
from trial_rows import trial_row

from tune.space import Candidate
from tune.strategy.ranking import contenders, rank
from tune.trial.row import Stage, TrialOutcome, TrialRow


def row(
    size: int, speed: float, memory: int, *, width: float = 0.01, stage: Stage = "probe", outcome: TrialOutcome = "ok"
) -> TrialRow:
    """A finished trial."""
    return trial_row(
        f"{size}-{stage}-{speed}", 1, stage, 0, Candidate(size), 1, outcome, "", 10.0, tokens_per_second=speed,
        low=speed * (1 - width), high=speed * (1 + width), memory=memory, node="w1",
    )  # fmt: skip


def test_a_tie_goes_to_the_smaller_memory() -> None:
    ranked = rank([row(8, 1000, 30), row(16, 1002, 60), row(4, 800, 20)])
    assert [s.candidate.micro_batch for s in ranked] == [8, 16, 4]
    assert [s.tied for s in ranked] == [True, True, False]


def test_a_wide_interval_does_not_let_a_slow_one_win() -> None:
    ranked = rank([row(8, 1000, 60, width=0.3), row(4, 800, 20, width=0.3)])
    assert ranked[0].candidate.micro_batch == 8
    assert ranked[1].tied


def test_overlapping_intervals_tie_though_the_means_lie_outside_of_them() -> None:
    fast, slow = row(8, 1000, 60, width=0.15), row(4, 800, 20, width=0.15)
    assert fast.speed
    assert slow.speed
    assert slow.speed.middle < fast.speed.low < slow.speed.high
    assert [s.tied for s in rank([fast, slow])] == [True, True]
    apart = [row(8, 1000, 60, width=0.1), row(4, 800, 20, width=0.1)]
    assert [s.tied for s in rank(apart)] == [False, False]


def test_confirmation_outweighs_a_lucky_first_measurement() -> None:
    rows = [row(8, 1100, 30), row(16, 1000, 60)]
    rows += [row(8, 950, 30, stage="confirm"), row(16, 1001, 60, stage="confirm")]
    assert [s.candidate.micro_batch for s in rank(rows)] == [16, 8]


@pytest.mark.parametrize("outcome", ["over_limit", "oom", "thrash"])
def test_one_confirmation_that_does_not_fit_disqualifies(outcome: TrialOutcome) -> None:
    rows = [row(8, 1000, 30), row(16, 1200, 60), row(16, 1200, 90, stage="confirm", outcome=outcome)]
    assert [s.candidate.micro_batch for s in rank(rows)] == [8]


def confirmed(size: int, speed: float, number: int, *, width: float = 0.01) -> TrialRow:
    """A confirmation of round ``number``."""
    return replace(row(size, speed, size, width=width, stage="confirm"), key=f"{size}-{number}", round=number)


def test_the_first_round_runs_the_best_three_and_the_control() -> None:
    rows = [row(size, 100 + size, size, width=0.1) for size in (1, 2, 4, 8)] + [row(16, 50, 5, outcome="oom")]
    assert [c.micro_batch for c in contenders(rows, Candidate(1))] == [8, 4, 2, 1]
    assert [c.micro_batch for c in contenders(rows, Candidate(16))] == [8, 4, 2]


def test_who_is_clearly_beaten_does_not_run_again() -> None:
    rows = [row(1, 100, 1), row(2, 200, 2), row(4, 201, 4), row(8, 150, 8)]
    assert [c.micro_batch for c in contenders(rows, Candidate(1))] == [4, 2, 1]


def test_confirmation_ends_when_the_winner_is_clear() -> None:
    explored = [row(1, 100, 1), row(2, 200, 2), row(4, 201, 4)]
    control = [confirmed(1, 100, 1)]
    apart = [*explored, confirmed(2, 190, 1), confirmed(4, 201, 1), *control]
    equal = [*explored, confirmed(2, 200, 1), confirmed(4, 200, 1), *control]
    unclear = [*explored, confirmed(2, 200, 1, width=0.1), confirmed(4, 198, 1, width=0.1), *control]
    assert contenders(apart, Candidate(1)) == []
    assert contenders(equal, Candidate(1)) == []
    assert [c.micro_batch for c in contenders(unclear, Candidate(1))] == [2, 4, 1]


def test_who_missed_a_round_cannot_win() -> None:
    """The machine became slower between the rounds: the one that was let go after the first must not gain by that."""
    rows = [confirmed(2, 200, 1), confirmed(4, 210, 1), confirmed(4, 180, 2), confirmed(1, 90, 2), confirmed(1, 100, 1)]
    assert rank(rows)[0].candidate == Candidate(4)


@pytest.mark.parametrize("memory", [(50, 90, 70), (90, 50, 70)])
def test_the_memory_of_a_candidate_is_the_most_that_any_of_its_runs_took(memory: tuple[int, int, int]) -> None:
    """Also of the first, whose speed no longer counts."""
    stages: tuple[Stage, ...] = ("probe", "confirm", "confirm")
    rows = [row(8, 1000, each, stage=stage) for each, stage in zip(memory, stages, strict=True)]
    assert [s.memory for s in rank(rows)] == [90]


def test_runs_that_differ_make_the_interval_wider() -> None:
    """By Student's t of all repeated candidates, whose runs scatter alike."""
    (alike,) = rank([confirmed(8, 1000, 1, width=0.02), confirmed(8, 1000, 2, width=0.02)])
    assert alike.speed.high / 1000 == pytest.approx(1 + 0.02 / 2**0.5, rel=1e-3), "two runs are more precise than one"
    pair = [confirmed(8, 1000, 1, width=0.001), confirmed(8, 1020, 2, width=0.001)]
    (alone,) = rank(pair)
    assert alone.speed.middle == pytest.approx(1010, rel=1e-3)
    others = [confirmed(size, speed, number) for size in (1, 2, 4) for number, speed in ((1, 500), (2, 510))]
    (first, *_) = rank(pair + others)
    assert first.candidate == alone.candidate
    assert alone.speed.low < 900 < first.speed.low < 1000 < 1020 < first.speed.high < 1040
