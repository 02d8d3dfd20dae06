"""A run by the clock: its budget, its cycles, its validations, and an interrupt in a long step."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import make_trainer

from train.config import Cycle, ResolvedConfig
from train.loop.trainer import Callbacks
from train.model_config import ModelConfig
from train.result import CycleReport, RunResult
from train.run_files.progress import checkpoints_in, read_progress


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> ResolvedConfig:
    """Steps of four micro-batches; an epoch has 82 of them."""
    return ResolvedConfig.of(
        data=str(small_shards), model=small_model, global_batch=8, micro_batch=2, precision="fp32", device="cpu"
    )  # fmt: skip


@dataclass
class SlowMachine:
    """A trainer on a clock by which each micro-batch and each forward pass of a validation takes a time."""

    micro_batch_seconds: float
    pass_seconds: float = 0.0
    compile_seconds: float = 0.0
    now: float = 0.0
    trained: float = 0.0
    validated: float = 0.0
    first_step_end: float = 0.0

    def __post_init__(self) -> None:
        self.reports: list[CycleReport] = []
        self.report_times: list[float] = []
        self.lines: list[str] = []

    def train(
        self, config: ResolvedConfig, should_discard: Callable[[], bool] = lambda: False, **options: Any
    ) -> RunResult:
        callbacks = Callbacks(
            self._on_cycle,
            options.pop("should_stop", lambda: False),
            should_discard=should_discard,
            on_line=self.lines.append,
            clock=lambda: self.now,
        )
        self.trainer = make_trainer(config, callbacks=callbacks, **options)
        forward = self.trainer.forward
        compiling = iter([self.compile_seconds])

        def slow(*batch: torch.Tensor) -> torch.Tensor:
            if self.trainer.model.training:
                self.now += self.micro_batch_seconds + next(compiling, 0.0)
                self.trained += self.micro_batch_seconds
            else:
                self.now += self.pass_seconds
                self.validated += self.pass_seconds
            return forward(*batch)

        self.trainer.forward = slow
        self.trainer.optimizer.register_step_post_hook(self._end_first_step)
        return self.trainer.run()

    def _end_first_step(self, *_: object) -> None:
        self.first_step_end = self.first_step_end or self.now

    def _on_cycle(self, report: CycleReport) -> None:
        self.reports.append(report)
        self.report_times.append(self.now)

    @property
    def losses(self) -> list[float]:
        return [loss for report in self.reports for loss in report.step_losses]


@pytest.mark.parametrize("micro_batch_seconds", [0.2, 2.0, 6.0])
def test_a_time_budget_includes_everything_after_the_first_step(
    config: ResolvedConfig, tmp_path: Path, micro_batch_seconds: float
) -> None:
    machine = SlowMachine(micro_batch_seconds, micro_batch_seconds / 3, compile_seconds=100.0)
    result = machine.train(config.replace(steps=None, time_budget=60.0), checkpoints=tmp_path)
    assert (result.outcome, result.reason) == ("finished", "time budget reached")
    seconds = machine.now - machine.first_step_end
    assert 60.0 - 4 * micro_batch_seconds - 10.0 < seconds <= 60.0
    assert result.val_loss is not None
    assert result.checkpoint


def test_the_schedule_ends_with_the_budgets_training(config: ResolvedConfig, tmp_path: Path) -> None:
    machine = SlowMachine(0.25, 0.1)
    machine.train(config.replace(steps=None, time_budget=60.0, warmup_steps=0), checkpoints=tmp_path)
    assert machine.reports[-1].learning_rate == pytest.approx(0.1 * config.optimization.learning_rate, rel=0.05)


def test_a_budget_shorter_than_a_step_ends_after_the_first_one(config: ResolvedConfig) -> None:
    machine = SlowMachine(6.0, 2.0)
    result = machine.train(config.replace(steps=None, time_budget=12.0))
    assert result.steps == 1
    assert machine.now - machine.first_step_end <= 12.0


@pytest.mark.parametrize(
    ("micro_batch_seconds", "low", "high"), [(0.4, 15, 25), (1.0, 15, 25), (4.0, 15, 30), (9.0, 36, 45)]
)
def test_a_report_follows_every_10_to_30_s_unless_a_step_takes_longer(
    config: ResolvedConfig, micro_batch_seconds: float, low: float, high: float
) -> None:
    machine = SlowMachine(micro_batch_seconds, micro_batch_seconds / 3)
    steps = max(6, int(100 / (4 * micro_batch_seconds)))
    machine.train(config.replace(steps=steps, checkpoint_every=1))
    intervals = [b - a for a, b in itertools.pairwise(machine.report_times)][:-1]
    assert intervals
    assert all(low <= seconds <= high for seconds in intervals)


@pytest.mark.parametrize("micro_batch_seconds", [0.4, 2.0, 9.0])
def test_validations_are_on_the_same_windows_and_take_at_most_a_tenth(
    config: ResolvedConfig, micro_batch_seconds: float
) -> None:
    machine = SlowMachine(micro_batch_seconds, 0.4 * micro_batch_seconds)
    result = machine.train(config.replace(steps=max(20, int(100 / (4 * micro_batch_seconds)))))
    first_pass = 2 * machine.pass_seconds
    last = machine.trainer.validator.passes(result.val_windows) * machine.pass_seconds  # type: ignore[union-attr]
    assert machine.validated - first_pass - last <= 0.1 * machine.trained
    assert {report.val_windows for report in machine.reports if report.val_loss is not None} == {result.val_windows}
    assert machine.reports[-1].val_loss == result.val_loss
    assert result.val_tokens == 32 * sum(report.val_windows for report in machine.reports)


def test_a_number_of_validation_batches_is_kept_whatever_it_takes(config: ResolvedConfig) -> None:
    machine = SlowMachine(1.0, 10.0)
    machine.train(config.replace(steps=6, cycle=Cycle(3, 2)))
    assert [report.val_windows for report in machine.reports] == [16, 16]


def test_cycles_by_time_leave_the_losses_as_they_are(config: ResolvedConfig) -> None:
    by_time, by_steps = SlowMachine(0.5, 0.1), SlowMachine(0.5, 0.1)
    by_time.train(config.replace(steps=30))
    by_steps.train(config.replace(steps=30, cycle=Cycle(7, 1)))
    assert by_time.losses == by_steps.losses
    assert [report.step for report in by_steps.reports] == [7, 14, 21, 28, 30]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_run_with_cycles_by_time_resumes_bit_for_bit(config: ResolvedConfig, tmp_path: Path, dropout: float) -> None:
    config = config.replace(model=replace(config.model, dropout=dropout), steps=40, cycle=Cycle(seconds=10.0))
    straight = SlowMachine(0.5, 0.1)
    straight.train(config)
    first, second, calls = SlowMachine(0.5, 0.1), SlowMachine(0.25, 0.1), itertools.count(1)
    stopped = first.train(config, checkpoints=tmp_path, should_stop=lambda: next(calls) >= 13)
    assert stopped.checkpoint
    windows = read_progress(Path(stopped.checkpoint)).val_windows
    assert windows == first.reports[0].val_windows > 0
    result = second.train(config, checkpoints=tmp_path, resume=Path(stopped.checkpoint))
    assert first.losses + second.losses == straight.losses
    assert result.val_windows == windows, "the number is kept, although this machine could do with twice as many"


def test_an_epoch_and_a_budget_of_many_are_announced(config: ResolvedConfig) -> None:
    machine = SlowMachine(1.0, 0.3)
    machine.train(config.replace(steps=None, time_budget=500.0, global_batch=64, micro_batch=16))
    windows = machine.trainer.data.epoch_windows
    assert windows
    assert "epochs" in machine.lines[0], "before the first step"
    assert f"epoch 2 begins at step {windows // 64 + 1}" in machine.lines


def test_a_long_step_is_announced_before_it_begins(config: ResolvedConfig) -> None:
    machine = SlowMachine(30.0, 10.0)
    machine.train(config.replace(steps=2))
    assert "4 micro-batches" in machine.lines[0]
    assert "2m" in machine.lines[0]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_an_interrupt_in_a_long_step_saves_the_last_whole_one(
    config: ResolvedConfig, tmp_path: Path, dropout: float
) -> None:
    """In the third micro-batch of the fourth step; the random state is that of the end of the third step."""
    config = config.replace(model=replace(config.model, dropout=dropout), steps=6, cycle=Cycle(4, 1))
    straight, first, second = SlowMachine(5.0), SlowMachine(5.0), SlowMachine(5.0)
    straight.train(config)
    stopped = first.train(config, lambda: first.now >= 70.0, checkpoints=tmp_path)
    assert (stopped.outcome, stopped.steps) == ("interrupted", 3)
    assert "step 4" in stopped.reason
    assert "2 of 4" in stopped.reason
    assert stopped.unreported_losses == straight.losses[:3]
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000003"]
    assert stopped.checkpoint
    second.train(config, checkpoints=tmp_path, resume=Path(stopped.checkpoint))
    assert second.losses == straight.losses


def test_an_interrupt_in_a_long_validation_ends_without_it(config: ResolvedConfig, tmp_path: Path) -> None:
    """A validation of 20 batches, after the third step, would take 800 s."""
    machine = SlowMachine(5.0, 10.0)
    result = machine.train(
        config.replace(steps=6, cycle=Cycle(3, 20)), lambda: machine.now >= 100.0, checkpoints=tmp_path
    )
    assert (result.outcome, result.steps, result.val_loss) == ("interrupted", 3, None)
    assert machine.now < 120.0
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000003"]
    assert machine.trainer.model.training
    assert result.val_tokens == 0


def test_an_interrupt_in_the_first_step_ends_with_nothing(config: ResolvedConfig, tmp_path: Path) -> None:
    machine = SlowMachine(5.0)
    result = machine.train(config.replace(steps=3), lambda: machine.now >= 10.0, checkpoints=tmp_path)
    assert (result.outcome, result.steps, result.checkpoint) == ("interrupted", 0, None)
    assert not checkpoints_in(tmp_path)


def test_short_steps_are_not_interrupted(config: ResolvedConfig) -> None:
    """Nobody waits for their end, and asking the other workers between micro-batches would cost time."""
    launched_steps: list[int] = []

    def should_discard() -> bool:
        launched_steps.append(machine.trainer.state.step)
        return False

    machine = SlowMachine(0.01)
    machine.train(config.replace(steps=5), should_discard)
    assert set(launched_steps) == {0}


def test_a_model_with_running_statistics_ends_its_step(config: ResolvedConfig) -> None:
    """They would contain the micro-batches of the discarded step."""
    trainer = make_trainer(config.replace(steps=2, cycle=Cycle(2, 0)), callbacks=Callbacks(should_discard=lambda: True))
    assert not trainer.has_buffers
    trainer.has_buffers = True
    assert trainer.run().steps == 2


def test_a_run_of_a_few_long_steps_has_a_speed(config: ResolvedConfig) -> None:
    from train.loop.result_builder import StepTimes, measure_speed

    times = StepTimes(
        steps=[30.0, 12.5, 12.3], data_wait=[0.0] * 3, optimizer=[0.4, 0.5, 0.4],
        micro_batches=[[20.0, 3.0, 3.1, 2.9], [3.0, 2.9, 3.1, 3.0], [2.9, 3.0, 3.0, 3.0]],
    )  # fmt: skip
    speed = measure_speed(times, 1000, workers=1)
    assert speed
    assert speed.unit == "micro-batch"
    assert speed.tokens_per_second == pytest.approx(1000 / 12.4)
    assert speed.low < speed.tokens_per_second < speed.high
    assert speed.steps == 11
    several = measure_speed(times, 1000, workers=2)
    assert several
    assert several.steps == 8, "the last micro-batch of a step exchanges gradients"
    assert measure_speed(replace(times, micro_batches=[[]] * 3), 1000, workers=1) is None
