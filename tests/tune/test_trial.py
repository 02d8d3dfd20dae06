"""One trial in this process: its row is on disk, whatever became of it, and its speed counts tokens rightly."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from train.config import ModelConfig, TrainConfig
from tune.record import Proposal, Row, read_rows
from tune.space import Candidate
from tune.trial import Request, run


@pytest.fixture
def training(small_shards: Path, small_model: ModelConfig) -> TrainConfig:
    return TrainConfig(data=small_shards, model=small_model, global_batch=8, micro_batch=4, device="cpu")


def attempt(training: TrainConfig, folder: Path, *, limit: float = 8e9, bar: float | None = None) -> Row:
    """Run one trial of ``training``."""
    folder.mkdir(exist_ok=True)
    proposal = Proposal(Candidate(training.micro_batch), "probe", bar=bar)
    request = Request(
        "m1", 1, proposal, training.to_json(), int(limit), 20, 60.0, 0.001, str(folder), time.time()
    )  # fmt: skip
    row = run(request)
    assert read_rows(folder) == [row]
    return row


def test_an_ordinary_trial(training: TrainConfig, tmp_path: Path) -> None:
    row = attempt(training, tmp_path)
    assert row.outcome == "ok"
    assert row.tokens_per_second
    assert row.low
    assert row.high
    assert row.low <= row.tokens_per_second <= row.high
    assert row.memory
    assert row.memory_source == "rss"
    assert row.accumulation == 2
    assert len(row.step_seconds) == 20


def test_too_much_memory_is_an_outcome(training: TrainConfig, tmp_path: Path) -> None:
    row = attempt(training, tmp_path, limit=1e6)
    assert row.outcome == "over_limit"
    assert len(row.step_seconds) < 20
    assert row.memory
    assert row.memory > 1e6


def test_a_trial_that_cannot_win_stops(training: TrainConfig, tmp_path: Path) -> None:
    row = attempt(training, tmp_path, bar=1e12)
    assert row.outcome == "stopped"
    assert len(row.step_seconds) < 20


def test_a_failure_is_an_outcome(training: TrainConfig, tmp_path: Path) -> None:
    row = attempt(replace(training, data=tmp_path / "nowhere"), tmp_path / "rows")
    assert row.outcome == "failed"
    assert "nowhere" in row.reason


def test_speed_does_not_depend_on_accumulation(training: TrainConfig, tmp_path: Path) -> None:
    """Counting micro-batches where steps are meant would make these differ eightfold."""
    speeds = []
    for batch in (8, 64):
        rows = [
            attempt(replace(training, global_batch=batch), tmp_path / f"{batch}-{again}").tokens_per_second or 0.0
            for again in range(2)
        ]
        speeds.append(max(rows))
    assert 0.25 < speeds[1] / speeds[0] < 4
