"""What ran on several machines is compared over each machine's own control."""

import math
from dataclasses import replace

import pytest
from trial_rows import trial_row

from tune.space import Candidate
from tune.strategy.nodes import control_speeds, normalize_speeds, pending_control, slowdown_factor
from tune.trial.row import Proposal, Stage, TrialRow


def row(number: int, node: str, size: int, speed: float | None, stage: Stage = "probe") -> TrialRow:
    """A trial's, with an interval of one percent to either side."""
    low, high = (speed / 1.01, speed * 1.01) if speed else (None, None)
    return trial_row(
        f"m{number}", number, stage, 0, Candidate(size), 1, "ok" if speed else "oom", "", 1.0,
        tokens_per_second=speed, low=low, high=high, node=node,
    )  # fmt: skip


def test_a_machine_that_is_slower_throughout_ranks_no_candidate_lower() -> None:
    rows = [row(1, "w1", 1, 1000.0), row(2, "w2", 1, 500.0, "control"), row(3, "w2", 2, 600.0), row(4, "w2", 4, None)]
    first, scaled, failed = normalize_speeds(rows)
    assert first == rows[0]
    assert failed == rows[3]
    assert scaled.tokens_per_second == pytest.approx(1200.0)
    assert scaled.speed
    width = math.log(scaled.speed.high / scaled.speed.low) / 2
    assert math.isclose(width, math.sqrt(3) * math.log(1.01)), "the controls are as uncertain as the trial"


def test_what_was_predicted_of_a_machine_stays_as_far_from_what_was_measured_there() -> None:
    measured = replace(row(3, "w2", 2, 600.0), predicted_speed=660.0)
    _, scaled = normalize_speeds([row(1, "w1", 1, 1000.0), row(2, "w2", 1, 500.0, "control"), measured])
    assert scaled.predicted_speed == pytest.approx(1320.0)
    assert scaled.tokens_per_second == pytest.approx(1200.0)


def test_one_machine_needs_no_other_control_and_its_rows_stay_as_they_are() -> None:
    rows = [row(1, "w1", 1, None), row(2, "w1", 2, 900.0)]
    assert normalize_speeds(rows) == rows
    assert pending_control("w1", rows) is None


def test_another_machine_first_runs_what_the_first_one_ran() -> None:
    rows = [row(1, "w1", 8, None), row(2, "w1", 4, 900.0)]
    control = pending_control("w2", rows)
    assert control == Proposal(Candidate(4), "control", node="w2")
    assert control is not None
    assert control.key("one") != Proposal(Candidate(4), "control", node="w3").key("one")
    assert pending_control("w2", rows[:1]) is None, "nothing to compare with"
    assert "w2" not in control_speeds([*rows, row(3, "w2", 4, None, "control")])
    assert slowdown_factor("w2", [*rows, row(3, "w2", 4, 450.0, "control")]) == pytest.approx(2.0)
    assert slowdown_factor("w2", rows) == slowdown_factor("w2", []) == 1.0
