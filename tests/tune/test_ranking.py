"""Who wins: confirmed speed, ties by interval, the smaller memory among equals, never what broke the limit."""

from tune.ranking import contenders, standings
from tune.record import Outcome, Row, Stage
from tune.space import Candidate


def row(
    size: int, speed: float, memory: int, *, width: float = 0.01, stage: Stage = "probe", outcome: Outcome = "ok"
) -> Row:
    """A finished trial."""
    return Row(
        f"{size}-{stage}-{speed}", 1, stage, 0, Candidate(size), 1, outcome, "", 10.0, tokens_per_second=speed,
        low=speed * (1 - width), high=speed * (1 + width), memory=memory,
    )  # fmt: skip


def test_a_tie_goes_to_the_smaller_memory() -> None:
    ranked = standings([row(8, 1000, 30), row(16, 1002, 60), row(4, 800, 20)])
    assert [s.candidate.micro_batch for s in ranked] == [8, 16, 4]
    assert [s.tied for s in ranked] == [True, True, False]


def test_a_wide_interval_does_not_let_a_slow_one_win() -> None:
    ranked = standings([row(8, 1000, 60, width=0.3), row(4, 800, 20, width=0.3)])
    assert ranked[0].candidate.micro_batch == 8
    assert ranked[1].tied


def test_confirmation_outweighs_a_lucky_first_measurement() -> None:
    rows = [row(8, 1100, 30), row(16, 1000, 60)]
    rows += [row(8, 950, 30, stage="confirm"), row(16, 1001, 60, stage="confirm")]
    assert [s.candidate.micro_batch for s in standings(rows)] == [16, 8]


def test_one_run_over_the_limit_disqualifies() -> None:
    rows = [row(8, 1000, 30), row(16, 1200, 60), row(16, 1200, 90, stage="confirm", outcome="over_limit")]
    assert [s.candidate.micro_batch for s in standings(rows)] == [8]


def test_contenders_are_the_best_three_and_the_control() -> None:
    rows = [row(size, 100 * size, size) for size in (1, 2, 4, 8)] + [row(16, 50, 5, outcome="oom")]
    assert [c.micro_batch for c in contenders(rows, Candidate(1))] == [8, 4, 2, 1]
    assert [c.micro_batch for c in contenders(rows, Candidate(16))] == [8, 4, 2]
