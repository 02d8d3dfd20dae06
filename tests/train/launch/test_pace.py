"""What the live line says of a run: its step, speed, loss and time left."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.shards import Manifest, read_manifest
from train.config import TrainConfig
from train.launch.pace import Pace
from train.model_config import ModelConfig
from train.result import TRAINING


@pytest.fixture
def manifest(small_shards: Path) -> Manifest:
    return read_manifest(small_shards)


@pytest.fixture
def config(small_model: ModelConfig) -> TrainConfig:
    """Its steps have 320 tokens."""
    return TrainConfig(model=small_model, micro_batch=10, global_batch=10, steps=100, device="cpu")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_line_has_step_speed_loss_and_time_left(config: TrainConfig, manifest: Manifest) -> None:
    pace = Pace(config, manifest, clock := Clock())
    assert pace.shown("building the model", 0) == ("building the model", "")
    assert pace.shown(TRAINING, 1) == (TRAINING, "step 1 of 100")
    for step in range(2, 11):
        clock.now += 0.5
        pace.shown(TRAINING, step)
    pace.cycle({"train_loss": 6.87123, "elapsed": 4.5})
    assert pace.shown(TRAINING, 10) == (TRAINING, "step 10 of 100 | 640 tokens/s | loss 6.871 | 45s left")
    assert pace.shown("saving the checkpoint", 10) == ("saving the checkpoint", "")
    clock.now += 60  # another worker continues from step 5
    assert pace.shown(TRAINING, 6)[1].startswith("step 6 of 100 | loss"), "two steps make a speed"
    clock.now += 1
    assert "| 320 tokens/s |" in pace.shown(TRAINING, 7)[1]


def test_the_speed_is_that_of_the_last_seconds_or_of_the_last_steps(config: TrainConfig, manifest: Manifest) -> None:
    pace = Pace(config, manifest, clock := Clock())
    for step in range(1, 101):
        pace.shown(TRAINING, step)
        clock.now += 0.1
    for step in range(101, 140):
        clock.now += 1
        pace.shown(TRAINING, step)
    assert "| 320 tokens/s |" in pace.shown(TRAINING, 139)[1], "the fast steps are forgotten"
    for step in range(140, 144):
        clock.now += 64
        pace.shown(TRAINING, step)
    assert "| 5 tokens/s |" in pace.shown(TRAINING, 143)[1], "each takes longer than the window"


@pytest.mark.parametrize("known", [0.0, 30.0])
def test_a_time_budget_is_what_is_left_of_it(config: TrainConfig, manifest: Manifest, known: float) -> None:
    pace = Pace(replace(config, steps=None, time_budget=100.0), manifest, clock := Clock())
    pace.shown(TRAINING, 1)
    if known:  # of a run that has been resumed
        pace.cycle({"train_loss": 5.0, "elapsed": known})
    clock.now += 10
    assert pace.shown(TRAINING, 2)[1].endswith("1m left" if known else "1m30s left")
    assert pace.shown(TRAINING, 2)[1].startswith("step 2 | 32 tokens/s")
    clock.now += 200
    assert pace.shown(TRAINING, 3)[1].endswith("0s left")


def test_without_an_end_the_run_is_an_epoch(config: TrainConfig, manifest: Manifest) -> None:
    pace = Pace(replace(config, steps=None), manifest)
    assert pace.shown(TRAINING, 1)[1] == f"step 1 of {manifest.splits['train']['tokens'] // 320:,}"
    large = replace(config, steps=None, micro_batch=100_000, global_batch=100_000)
    assert Pace(large, manifest).total == 1, "a step that is larger than an epoch is one all the same"
