"""Cycles, validations and time budgets end by the clock."""

import pytest

from train.config import Cycle, DurationConfig
from train.loop.epochs import Epochs
from train.loop.pace import MIN_TRAIN_SHARE, Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def pace_after_first_step(clock: Clock, *, budget: float | None = None) -> Pace:
    pace = Pace(DurationConfig(time_budget=budget, cycle=Cycle(seconds=20.0)), 1, clock)
    pace.begin_step()
    clock.now += 50.0
    pace.end_step()
    return pace


def step(pace: Pace, clock: Clock, seconds: float) -> None:
    pace.begin_step()
    clock.now += seconds
    pace.end_step()


@pytest.mark.parametrize("step_seconds", [0.1, 1.0, 3.0, 7.0, 12.0, 15.0, 40.0])
def test_a_cycle_by_time_ends_after_10_to_30_s_or_after_a_longer_step(step_seconds: float) -> None:
    clock = Clock()
    pace = pace_after_first_step(clock)
    step(pace, clock, step_seconds)
    pace.begin_cycle()
    start, last = clock.now, pace.next_step_ends_cycle(is_new=True)
    step(pace, clock, step_seconds)
    while not last:
        last = pace.next_step_ends_cycle(is_new=False)
        step(pace, clock, step_seconds)
    assert clock.now - start == pytest.approx(step_seconds) if step_seconds > 20 else 10 <= clock.now - start <= 30


def test_a_budget_leaves_time_for_the_last_validation_and_checkpoint() -> None:
    clock = Clock()
    pace = pace_after_first_step(clock, budget=60.0)
    pace.pass_seconds = 1.5
    assert pace.elapsed == 0.0, "the first step is not part of it"
    steps = 0
    while True:
        pace.reserve(passes=4, seconds=5.0)
        if pace.is_budget_used():
            break
        step(pace, clock, 4.0)
        steps += 1
    assert steps == 12, "12 steps take 48 s, the validation 6 s, the checkpoint 5 s; another step would not fit"


def test_most_of_a_budget_is_training_even_if_the_end_takes_longer() -> None:
    pace = pace_after_first_step(Clock(), budget=8.0)
    pace.reserve(passes=0, seconds=100.0)
    assert pace.train_budget == MIN_TRAIN_SHARE * 8.0


def test_the_second_step_is_estimated_by_what_does_not_compile() -> None:
    """A forward pass, or the first step if it was faster."""
    clock = Clock()
    pace = pace_after_first_step(clock)
    assert pace.step_seconds == 0.0, "it may have filled caches for most of its time"
    pace.pass_seconds = 20.0
    assert pace.step_seconds == 50.0
    pace.pass_seconds = 0.5
    assert pace.step_seconds == 1.5
    compiling = Pace(DurationConfig(), 4, clock, compiles=True)
    compiling.begin_step()
    clock.now += 50.0
    compiling.end_step()
    assert compiling.step_seconds == 0.0, "not known"
    compiling.pass_seconds = 0.5
    assert compiling.step_seconds == 6.0


def test_validations_take_at_most_a_tenth_of_the_training_time() -> None:
    clock = Clock()
    pace = pace_after_first_step(clock)
    pace.pass_seconds = 0.3
    step(pace, clock, 20.0)
    passes = pace.val_passes()
    assert passes == 3, "a twentieth of 20 s, so that it also fits cycles that are faster"
    assert pace.may_validate(passes)
    assert not pace.may_validate(7)
    pace.end_training()
    pace.end_validation(passes, 1.8)  # It was twice as slow as expected.
    pace.begin_cycle()
    assert pace.pass_seconds == pytest.approx(0.6)
    step(pace, clock, 10.0)
    assert not pace.may_validate(passes), "3.6 s of 30 s"
    step(pace, clock, 10.0)
    assert pace.may_validate(passes), "3.6 s of 40 s"


def test_a_pass_that_is_long_for_its_cycle_is_a_validation_all_the_same() -> None:
    clock = Clock()
    pace = pace_after_first_step(clock)
    pace.pass_seconds = 7.0
    step(pace, clock, 20.0)
    assert pace.val_passes() == 1
    assert not pace.may_validate(1)


def test_an_epoch_is_announced_when_it_begins() -> None:
    lines: list[str] = []
    clock = Clock()
    epochs = Epochs(100, 8, lines.append, clock)
    for number in range(26):  # The 13th step begins with window 96 and ends in the second epoch.
        epochs.begin_step(8 * number, number)
        clock.now += 1.0
    assert lines == ["epoch 2 begins at step 13", "epoch 3 begins at step 26"]


def test_epochs_of_a_small_data_set_do_not_fill_the_screen() -> None:
    lines: list[str] = []
    clock = Clock()
    epochs = Epochs(8, 8, lines.append, clock)
    for number in range(100):
        epochs.begin_step(8 * number, number)
        clock.now += 0.5
    assert lines == [f"epoch {number} begins at step {number}" for number in (2, 22, 42, 62, 82)]


def test_a_resumed_run_does_not_announce_an_epoch_again() -> None:
    lines: list[str] = []
    epochs = Epochs(100, 10, lines.append, Clock(), consumed=150)
    epochs.begin_step(150, 15)
    assert not lines
    epochs.begin_step(200, 20)
    assert lines == ["epoch 3 begins at step 21"]


@pytest.mark.parametrize(("steps", "epochs"), [(30.0, None), (1000.0, "80")])
def test_a_budget_of_many_epochs_is_announced(steps: float, epochs: str | None) -> None:
    lines: list[str] = []
    Epochs(100, 8, lines.append, Clock()).announce_budget(steps)
    assert lines == [] if epochs is None else f"about {epochs} epochs" in lines[0]
