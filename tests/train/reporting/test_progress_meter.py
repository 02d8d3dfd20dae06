"""What the live line says of a run: its step, speed, loss and time left."""

from pathlib import Path

import pytest

from pipeline.shards import Manifest, read_manifest
from train.config import TrainConfig
from train.model_config import ModelConfig
from train.reporting.progress_meter import ProgressMeter
from train.result import TRAINING


@pytest.fixture
def manifest(small_shards: Path) -> Manifest:
    return read_manifest(small_shards)


@pytest.fixture
def config(small_model: ModelConfig) -> TrainConfig:
    """Its steps have 320 tokens."""
    return TrainConfig.of(model=small_model, micro_batch=10, global_batch=10, steps=100, device="cpu")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_line_has_step_speed_loss_and_time_left(config: TrainConfig, manifest: Manifest) -> None:
    pace = ProgressMeter(
        config.step_tokens, config.total_steps, config.duration.time_budget, manifest, clock := Clock()
    )
    assert pace.describe("building the model", 0) == ("building the model", "")
    for step in range(1, 11):
        pace.describe(TRAINING, step)
        clock.now += 0.5
    clock.now -= 0.5
    pace.cycle({"train_loss": 6.87123, "elapsed": 4.5})
    assert pace.describe(TRAINING, 10) == (TRAINING, "step 10 of 100 | 640 tokens/s | loss 6.871 | 45s left")
    assert pace.describe("saving the checkpoint", 10) == ("saving the checkpoint", "")
    clock.now += 60  # another worker continues from step 5
    assert "tokens/s" not in pace.describe(TRAINING, 6)[1], "two steps make a speed"
    clock.now += 1
    assert "| 320 tokens/s |" in pace.describe(TRAINING, 7)[1]


def test_the_speed_is_that_of_the_last_seconds_or_of_the_last_steps(config: TrainConfig, manifest: Manifest) -> None:
    pace = ProgressMeter(
        config.step_tokens, config.total_steps, config.duration.time_budget, manifest, clock := Clock()
    )
    for first, last, seconds, speed in ((1, 101, 0.1, "3,200"), (101, 140, 1, "320"), (140, 144, 64, "5")):
        for step in range(first, last):
            clock.now += seconds
            pace.describe(TRAINING, step)
        assert f"| {speed} tokens/s |" in pace.describe(TRAINING, last - 1)[1], "fast steps are forgotten"


@pytest.mark.parametrize(
    ("trained_seconds", "elapsed", "left"), [(0.0, 0.0, "1m30s"), (30.0, 0.0, "1m"), (30.0, 40.0, "50s")],
    ids=["new", "resumed", "resumed, after its first cycle"],
)  # fmt: skip
def test_a_time_budget_is_what_is_left_of_it(
    config: TrainConfig, manifest: Manifest, trained_seconds: float, elapsed: float, left: str
) -> None:
    pace = ProgressMeter(config.step_tokens, None, 100.0, manifest, clock := Clock(), trained_seconds)
    pace.describe(TRAINING, 1)
    if elapsed:
        pace.cycle({"train_loss": 5.0, "elapsed": elapsed})
    clock.now += 10
    assert pace.describe(TRAINING, 2)[1].endswith(f" {left} left")
    clock.now += 200
    assert pace.describe(TRAINING, 3)[1].endswith("0s left")


def test_without_an_end_the_run_is_an_epoch(config: TrainConfig, manifest: Manifest) -> None:
    assert ProgressMeter(config.step_tokens, None, None, manifest).total == manifest.splits["train"]["tokens"] // 320
    large = config.replace(steps=None, micro_batch=100_000, global_batch=100_000)
    assert ProgressMeter(large.step_tokens, large.total_steps, large.duration.time_budget, manifest).total == 1, (
        "a step that is larger than an epoch is one all the same"
    )


def test_a_long_step_shows_its_micro_batches_and_the_time_left(config: TrainConfig, manifest: Manifest) -> None:
    """Already in the first step, which ends before the run's time begins."""
    first = "running the first step"
    pace = ProgressMeter(320, 10, None, manifest, clock := Clock())
    assert pace.describe(first, 0, 0, 120) == (first, "")
    texts: list[str] = []
    for micro_batch in range(1, 4):
        clock.now += 5.0
        texts.append(pace.describe(first, 0, micro_batch, 120)[1])
    assert texts[-1] == "micro-batch 4 of 120, 9m45s left in the step"
    pace.describe(TRAINING, 1, 0, 120)
    clock.now += 10.0
    text = pace.describe(TRAINING, 1, 2, 120)[1]
    assert text == "step 1 of 10 | micro-batch 3 of 120, 9m50s left in the step | 1 tokens/s | 1h29m50s left"


def test_short_steps_show_no_micro_batches(config: TrainConfig, manifest: Manifest) -> None:
    pace = ProgressMeter(320, 10, None, manifest, clock := Clock())
    texts: list[str] = []
    for micro_batch in range(4):
        clock.now += 0.25
        texts.append(pace.describe(TRAINING, 3, micro_batch, 4)[1])
    assert "micro-batch" not in " ".join(texts)
    assert "| 320 tokens/s |" in texts[-1]
