"""The loop trains: the loss falls along a known curve, however the step is executed, and goes on where it stopped."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from train.config import Cycle, ModelConfig, TrainConfig
from train.loop import Trainer
from train.memory import is_exhausted
from train.result import CycleReport, RunResult

GOLDEN = [5.7706, 5.7397, 5.7076, 5.7358, 5.6804, 5.6705, 5.6786, 5.6430, 5.6498, 5.6454]
"""Losses of the first ten steps: whatever changes the mathematics of a step moves them."""


@pytest.fixture
def config(small_shards: Path, small_model: ModelConfig) -> TrainConfig:
    return TrainConfig(
        data=small_shards, model=small_model, global_batch=8, micro_batch=8, steps=40, cycle=Cycle(20, 2),
        learning_rate=3e-3, warmup_steps=10, precision="fp32", device="cpu",
    )  # fmt: skip


def train(config: TrainConfig, **options: Any) -> tuple[RunResult, list[float]]:
    reports: list[CycleReport] = []
    result = Trainer(config, on_cycle=reports.append, **options).run()
    return result, [loss for report in reports for loss in report.step_losses]


def stop_at(step: int) -> Any:
    """A ``should_stop`` that the loop asks once after every step."""
    calls = itertools.count(1)
    return lambda: next(calls) >= step


def test_the_loss_falls(config: TrainConfig) -> None:
    result, losses = train(dataclasses.replace(config, steps=300, cycle=Cycle(50, 2)))
    assert result.outcome == "finished"
    assert result.steps == 300
    assert len(losses) == 300
    assert losses[0] == pytest.approx(5.77, abs=0.05)  # ln(320)
    assert result.train_loss is not None
    assert result.train_loss < 4.0
    assert result.loss_curve[0][1] > result.loss_curve[3][1] > result.loss_curve[5][1]


def test_the_loss_follows_its_golden_curve(config: TrainConfig) -> None:
    _, losses = train(dataclasses.replace(config, steps=10))
    assert losses == pytest.approx(GOLDEN, rel=2e-4)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_accumulation_changes_nothing(config: TrainConfig, micro_batch: int) -> None:
    _, expected = train(config)
    _, losses = train(dataclasses.replace(config, micro_batch=micro_batch))
    assert losses == pytest.approx(expected, rel=1e-4)


def test_the_parts_of_a_step_make_no_more_than_the_step(config: TrainConfig) -> None:
    reports: list[CycleReport] = []
    result = Trainer(config, on_cycle=reports.append).run()
    assert all(0 < r.optimizer_seconds < r.train_seconds - r.data_wait_seconds for r in reports)
    assert result.optimizer_fraction is not None
    assert 0 < result.optimizer_fraction < 1


def test_the_same_seed_gives_the_same_run(config: TrainConfig) -> None:
    assert train(config)[1] == train(config)[1]
    assert train(config)[1] != train(dataclasses.replace(config, seed=1))[1]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_resumed_run_goes_on_bit_for_bit(config: TrainConfig, tmp_path: Path, dropout: float) -> None:
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=dropout))
    straight, expected = train(config)
    first, before = train(config, checkpoints=tmp_path, should_stop=stop_at(13))
    assert first.outcome == "interrupted"
    assert first.steps == 13
    assert first.checkpoint
    second, after = train(config, checkpoints=tmp_path, resume=Path(first.checkpoint))
    assert before + after == expected
    assert second.val_loss == straight.val_loss
    assert second.train_tokens == straight.train_tokens


def test_a_time_budget_ends_the_run(config: TrainConfig) -> None:
    result, _ = train(dataclasses.replace(config, steps=None, time_budget=0.5))
    assert result.outcome == "finished"
    assert "time budget" in result.reason
    assert 0.4 < result.seconds < 5


@pytest.mark.parametrize(
    ("text", "exhausted"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", True),
        ("CUDA error: out of memory", True),
        ("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", False),
    ],
)
def test_memory_that_ran_out_is_known_by_its_words(text: str, exhausted: bool) -> None:
    assert is_exhausted(RuntimeError(text)) is exhausted


@pytest.mark.gpu
def test_the_gpu_trains(config: TrainConfig) -> None:
    result, losses = train(dataclasses.replace(config, device="cuda", precision="auto"))
    assert result.outcome == "finished"
    assert losses[-1] < losses[0]
    assert torch.cuda.is_available()
