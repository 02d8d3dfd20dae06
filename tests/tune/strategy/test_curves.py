"""What is expected of sizes that have not run: from the nearest runs, and never beyond what was measured."""

from dataclasses import replace
from typing import Any

import pytest
from trial_rows import changed, trial_row

from infra.device.hardware import cpu_info
from train.config import TrainConfig
from train.resolved import resolve
from tune.space import Candidate, make_space
from tune.strategy.curves import BACK_OFF_FACTOR, MARGIN, FittedCurves
from tune.trial.row import TrialOutcome, TrialRow

SPACE = make_space(
    resolve(TrainConfig.of(global_batch=64, micro_batch=8), cpu_info()), ("checkpointing=none,selective,full",)
)
OWN, OTHER = SPACE.control.knobs, SPACE.combinations[1]


def row(
    size: int, *, memory: float = 0.0, speed: float | None = 100.0, outcome: TrialOutcome = "ok", knobs=OWN
) -> TrialRow:
    """A finished trial."""
    candidate = Candidate(size, knobs)
    return trial_row(
        f"m{size}", 1, "probe", 0, candidate, 1, outcome, "", 10.0, tokens_per_second=speed, memory=int(memory),
        node="w1",
    )  # fmt: skip


def curves(*rows: TrialRow, limit: float = 100e9) -> FittedCurves:
    """Of a prior that says one gigabyte a sequence."""
    return FittedCurves(SPACE, lambda candidate: candidate.micro_batch * 1e9, limit, rows)


def test_what_is_predicted_at_exactly_the_margin_fits() -> None:
    limit = 8e9 / (1 - MARGIN)
    assert curves(limit=limit).fits(Candidate(8, OWN))
    assert not curves(limit=0.999 * limit).fits(Candidate(8, OWN))


@pytest.mark.parametrize("sizes", [(32, 16), (16, 32)])
@pytest.mark.parametrize("outcome", ["oom", "over_limit", "thrash"])
def test_nothing_above_four_fifths_of_the_smallest_that_did_not_fit(
    sizes: tuple[int, int], outcome: TrialOutcome
) -> None:
    assert BACK_OFF_FACTOR == 0.8
    fitted = curves(*(row(size, speed=None, outcome=outcome) for size in sizes))
    assert fitted.max_micro_batch(OWN) == 0.8 * 16
    assert [size for size in SPACE.micro_batches_for(OWN) if fitted.fits(Candidate(size, OWN))] == [1, 2, 4, 8]
    assert fitted.fits(Candidate(64, OTHER)), "of other knobs this says nothing"


def test_a_trial_that_failed_for_another_reason_says_nothing_about_memory() -> None:
    assert curves(row(16, speed=None, outcome="failed")).fits(Candidate(64, OWN))


def test_a_run_shifts_the_prediction_and_a_second_one_tilts_it() -> None:
    once = curves(row(8, memory=10e9))
    assert once.memory(Candidate(16, OWN)) == pytest.approx(18e9)
    assert once.memory(Candidate(16, OTHER)) == pytest.approx(18e9), "other knobs get the same offset"
    twice = curves(row(8, memory=10e9), row(16, memory=26e9))
    assert twice.memory(Candidate(32, OWN)) == pytest.approx(58e9)
    assert twice.memory(Candidate(32, OTHER)) == pytest.approx(38e9), "the median of both offsets"


def test_a_run_that_stopped_because_it_cannot_win_shifts_the_prediction_of_other_knobs() -> None:
    fitted = curves(row(8, memory=10e9, outcome="pruned"))
    assert fitted.memory(Candidate(16, OTHER)) == pytest.approx(18e9)


def test_what_did_not_fit_does_not_shift_the_prediction() -> None:
    """The peak of a run that was ended early is not its peak."""
    fitted = curves(row(8, memory=50e9, speed=None, outcome="over_limit"))
    assert fitted.memory(Candidate(4, OTHER)) == 4e9


def test_speed_between_two_sizes_and_nowhere_else() -> None:
    """A step of s sequences takes s + 4 units, so that 1/speed is affine in 1/size."""
    fitted = curves(row(2, speed=2 / 6), row(16, speed=16 / 20))
    assert fitted.speed(Candidate(8, OWN)) == pytest.approx(8 / 12)
    assert fitted.speed(Candidate(16, OWN)) == pytest.approx(16 / 20)
    assert fitted.speed(Candidate(32, OWN)) is None
    assert fitted.speed(Candidate(1, OWN)) is None
    assert fitted.speed(Candidate(8, OTHER)) is None
    assert curves(row(8), row(8)).speed(Candidate(8, OWN)) is None


def test_accumulations_share_the_curves_of_memory_and_speed() -> None:
    """A step of a micro-batches of s sequences takes a (s + 4) + 8 units, and one sequence needs a gigabyte."""
    space = make_space(SPACE.base, (), (1, 2, 4))

    def pair(size: int, times: int) -> Candidate:
        return Candidate(size, (("accumulation", times),))

    def ran(size: int, times: int, **other: Any) -> TrialRow:
        fast = size * times / (times * (size + 4) + 8)
        return replace(row(size, memory=2e9 + size * 1e9, speed=fast), candidate=pair(size, times), **other)

    def known(*rows: TrialRow) -> FittedCurves:
        return FittedCurves(space, lambda candidate: candidate.micro_batch * 1e9, 100e9, rows)

    one, two = known(ran(4, 1), ran(16, 1)), known(ran(4, 1), ran(16, 1), ran(16, 2))
    assert one.speed(pair(8, 1)) == pytest.approx(8 / 20)
    assert one.speed(pair(8, 2)) is None, "what a step costs is not known apart"
    assert two.speed(pair(8, 2)) == pytest.approx(16 / 32)
    assert one.memory(pair(32, 4)) == pytest.approx(34e9)
    unfit = changed(ran(24, 2, outcome="oom"), tokens_per_second=None)
    assert [known(unfit).fits(pair(size, 1)) for size in (16, 24)] == [True, False]
    assert known(*two.rows, unfit).max_micro_batch(pair(1, 4).knobs) == 23, (
        "closer than four fifths, as the line is known"
    )


def test_a_stopped_trial_counts_as_measured_and_one_that_did_not_fit_does_not() -> None:
    rows = [row(16, outcome="pruned"), row(8), row(32, outcome="thrash"), row(2, outcome="failed")]
    assert curves(*rows).measured_rows(OWN) == [rows[1], rows[0]]


def test_what_ran_is_feasible_whatever_the_prediction_says() -> None:
    fitted = curves(row(8, memory=99e9), row(4, memory=50e9))
    assert fitted.feasible_sizes(OWN) == [1, 2, 4, 8]
    assert fitted.feasible_sizes(OWN) == curves(*(replace(r, outcome="pruned") for r in fitted.rows)).feasible_sizes(
        OWN
    )
