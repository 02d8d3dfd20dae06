"""A cycle's numbers: each is of the steps, the time and the tokens that it says it is of."""

from dataclasses import replace

import pytest
import torch

from pipeline.shards import Manifest
from train.config import Cycle, ResolvedConfig
from train.loop.cycle import RunningCycle, close_cycle, open_cycle, report, step_seconds
from train.model_config import ModelConfig
from train.models.parallel import Workers

CPU = torch.device("cpu")
CONFIG = ResolvedConfig.of(
    model=ModelConfig(layers=1, heads=1, width=16, context_length=10), global_batch=4, micro_batch=2,
    cycle=Cycle(5, 2),
)  # fmt: skip
"""40 tokens per step; validation batches of 20."""
MANIFEST = Manifest(
    config={}, tokenizer_sha256="", shards=[], inputs={}, report={}, fingerprint="",
    splits={"train": {"books": 6, "tokens": 2400}, "val": {"books": 1, "tokens": 400}},
)  # fmt: skip


@pytest.fixture
def cycle() -> RunningCycle:
    """Steps 11 to 15, of which the first was done before an interruption, then eleven validation windows, two a batch.

    It began at 100 s; steps ended at 101, 103, 104 and 105 s, validation at 108 s.
    """
    made = RunningCycle(
        first=10, stop=15, start=100.0, losses=torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]),
        norms=torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4]), resumed_steps=1, step_ends=[101.0, 103.0, 104.0, 105.0],
        backward_ends=[100.75, 102.5, 103.5, 104.75], learning_rate=0.02,
        batch_waits=[(100.0, 100.25), (101.0, 101.0), (103.0, 103.125), (104.0, 104.0)],
        val_losses=torch.tensor([2.0, 4.0, 6.0, 2.0, 4.0, 3.0]), val_windows=11,
    )  # fmt: skip
    close_cycle(made, Workers(CONFIG.replace(workers=1).batch.workers), CPU)
    made.end = 108.0
    return made


def test_a_report_counts_what_it_names(cycle: RunningCycle) -> None:
    made = report(cycle, CONFIG.batch, CONFIG.model.context_length, MANIFEST, val_tokens=240, elapsed=77.0)
    assert made.step == 15
    assert made.train_loss == 3.0
    assert made.step_losses == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert made.val_loss == pytest.approx(21 / 5.5), "the last batch is of one window"
    assert made.train_tokens == 15 * 40
    assert made.val_tokens == 240 + 11 * 10
    assert made.batches == 15 + 350 // 40, "validation batches count in batches of a step's size"
    assert made.books_seen == 600 * 6 // 2400
    assert made.gradient_norm == pytest.approx(0.4)
    assert (made.learning_rate, made.elapsed) == (0.02, 77.0)


def test_a_report_times_what_was_done_here(cycle: RunningCycle) -> None:
    made = report(cycle, CONFIG.batch, CONFIG.model.context_length, MANIFEST, val_tokens=240, elapsed=77.0)
    assert made.cycle_seconds == 8.0
    assert made.train_seconds == 5.0
    assert made.data_wait_seconds == 0.375
    assert made.optimizer_seconds == 0.25 + 0.5 + 0.5 + 0.25
    assert made.cycle_tokens == 4 * 40 + 11 * 10, "the step before the interruption took none of this time"
    assert made.epoch_seconds == 2400 / (4 * 40 / 5.0)
    assert step_seconds(cycle) == [1.0, 2.0, 1.0, 1.0]
    assert "tok/sec: 33.75" in made.format_line()


def test_validation_is_of_all_workers(cycle: RunningCycle) -> None:
    """Eleven windows are two whole batches of both, and one of three windows between them."""
    cycle.host_values = torch.zeros(5), torch.zeros(5), torch.tensor([2.0, 4.0, 3.0])
    made = report(
        cycle, replace(CONFIG.batch, workers=2), CONFIG.model.context_length, MANIFEST, val_tokens=0, elapsed=0.0
    )
    assert made.val_tokens == 11 * 10
    assert made.val_loss == pytest.approx(9 / (11 / 4))


def test_cycles_end_at_multiples_of_their_length() -> None:
    """Also those of a run that was interrupted, or whose length was changed."""
    for first, step, stop in ((0, 0, 5), (5, 5, 10), (5, 7, 10), (12, 12, 15), (10, 12, 15), (0, 4, 5)):
        earlier = [9.0] * (step - first)
        made = open_cycle(first, step, Cycle(5), earlier, CPU)
        assert (made.first, made.stop, made.steps) == (first, stop, len(earlier))
        assert made.losses.tolist() == earlier + [0.0] * (stop - step)


def test_micro_batches_are_timed_by_the_marks_that_a_step_has(cycle: RunningCycle) -> None:
    """From one request for a batch to the next, or to the end of the backward pass."""
    cycle.batch_waits = [
        (float(start), start + 0.1) for start in (100.0, 100.5, 101.0, 102.0, 103.0, 103.25, 104.0, 104.5)
    ]
    assert cycle.micro_batch_seconds == [[0.5, 0.25], [1.0, 0.5], [0.25, 0.25], [0.5, 0.25]]


def test_a_cycle_by_time_has_room_for_any_number_of_steps() -> None:
    made = open_cycle(3, 4, Cycle(), [7.0], CPU)
    assert made.stop is None
    size = len(made.losses)
    made.step_ends = [0.0] * (size - 1)
    made.make_room()
    assert len(made.losses) == len(made.norms) == 2 * size
    assert made.losses[0] == 7.0
