"""Every trial gets a row: its own, or the driver's where it died, did not end, or its row did not arrive."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.cluster import connected
from infra.hardware import cpu_facts
from train.config import TrainConfig
from train.model_config import ModelConfig
from train.resolve import resolve
from tune.ray_tune import ATTEMPTS, Listener, Proposals, Running, drive, outcome
from tune.space import make_space
from tune.strategy.base import Grid
from tune.trial.row import Proposal, Row, read_rows, write_row
from tune.trial.run import Request

COMPILE_SECONDS = 1.0


@pytest.fixture
def training(small_shards: Path, small_model: ModelConfig) -> TrainConfig:
    return TrainConfig(data=small_shards, model=small_model, global_batch=2, micro_batch=1, device="cpu")


def proposals(training: TrainConfig, folder: Path, *, slow: int | None = None) -> tuple[Proposals, list[Request]]:
    """The grid over ``training`` with rows in ``folder``, and what was begun; ``slow`` names a size without an end."""
    space, begun = make_space(resolve(training, cpu_facts()), ()), []

    def request(proposal: Proposal, rows: Sequence[Row]) -> Request:
        config, seconds = space.config(proposal.candidate), 200.0
        if proposal.candidate.micro_batch == slow:
            config, seconds = replace(config, global_batch=10**6), 1.0  # hours for the first step
        return Request(
            proposal.key("space"), len(rows) + 1, proposal, config.to_json(), 8 * 10**9, 8, seconds, 0.01, str(folder),
            time.time(),
        )  # fmt: skip

    listener = Listener(begun.append, lambda row, rows: None)
    return Proposals(Grid(space), folder, listener, request, COMPILE_SECONDS), begun


def test_a_row_that_never_arrives_ends_its_trial(training: TrainConfig, tmp_path: Path) -> None:
    """As from a machine that writes into a folder of its own."""
    searcher, begun = proposals(training, tmp_path)
    for attempt in range(ATTEMPTS):
        assert read_rows(tmp_path) == []
        assert searcher.suggest(f"trial-{attempt}") == {"request": begun[-1]}
        assert searcher.suggest("another") is None
        searcher.on_trial_complete(f"trial-{attempt}", {"outcome": "ok"})
    assert len({request.key for request in begun}) == 1
    (row,) = read_rows(tmp_path)
    assert (row.key, row.outcome) == (begun[0].key, "failed")
    assert row.reason == f"it ran 3 times and its row did not arrive: can its process write to {tmp_path}?"
    searcher.suggest("next")
    assert begun[-1].proposal.candidate != begun[0].proposal.candidate


@pytest.mark.parametrize(
    ("started", "reason"), [(True, "died 3 times"), (False, "could not be started, tried 3 times")]
)
def test_a_process_that_dies_is_begun_three_times(
    training: TrainConfig, tmp_path: Path, started: bool, reason: str
) -> None:
    searcher, begun = proposals(training, tmp_path)
    for attempt in range(ATTEMPTS):
        assert read_rows(tmp_path) == []
        searcher.suggest(f"trial-{attempt}")
        if started:
            searcher.on_trial_result(f"trial-{attempt}", {"actor": None})
        searcher.on_trial_complete(f"trial-{attempt}", error=True)
    (row,) = read_rows(tmp_path)
    assert (row.key, row.outcome) == (begun[0].key, "failed")
    assert reason in row.reason


def test_a_trial_that_died_once_has_the_row_of_its_second_attempt(training: TrainConfig, tmp_path: Path) -> None:
    searcher, begun = proposals(training, tmp_path)
    searcher.suggest("first")
    searcher.on_trial_complete("first", error=True)
    searcher.suggest("second")
    candidate = begun[1].proposal.candidate
    row = Row(begun[1].key, 1, "probe", 0, candidate, 1, "ok", "ran its 8 steps", 1.0, tokens_per_second=100.0)
    write_row(tmp_path, row)
    searcher.on_trial_complete("second", {"outcome": "ok"})
    assert read_rows(tmp_path) == [row]


def test_a_row_that_cannot_be_written_says_so_at_once(training: TrainConfig, tmp_path: Path) -> None:
    """As on a machine without the search's folder."""
    searcher, begun = proposals(training, tmp_path)
    searcher.suggest("trial")
    elsewhere = replace(begun[0], folder=str(tmp_path / "elsewhere"))
    searcher.on_trial_complete("trial", outcome(elsewhere))
    (row,) = read_rows(tmp_path)
    assert row.outcome == "failed"
    assert "elsewhere" in row.reason
    assert "No such file or directory" in row.reason


def test_a_process_is_killed_when_its_time_is_up_and_never_after_its_end() -> None:
    killed: list[str] = []
    for name, ended in (("late", False), ("in time", True)):
        trial = Running(None, 0.05)  # type: ignore[arg-type]
        time.sleep(0.1)  # waiting for a process does not count
        trial.limit(lambda name=name: killed.append(name))
        assert killed == ["late"][: len(killed)]
        if ended:
            trial.ended()
        time.sleep(0.2)
        assert trial.overdue is not ended
    assert killed == ["late"]


def test_a_trial_that_does_not_end_is_killed_and_one_that_was_killed_runs_again(
    training: TrainConfig, tmp_path: Path, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of one takes hours, as a compilation may; the other's process is killed from outside, once."""
    searcher, begun = proposals(training, tmp_path, slow=1)
    told = searcher.on_trial_result

    def and_kill_the_second(trial_id: str, result: dict[str, Any]) -> None:
        told(trial_id, result)
        if len(begun) == 2:
            os.kill(result["pid"], signal.SIGKILL)

    monkeypatch.setattr(searcher, "on_trial_result", and_kill_the_second)
    with connected(cluster):
        drive(searcher, tmp_path, {"CPU": 1})
    slow, other = read_rows(tmp_path)
    assert (slow.key, slow.outcome) == (begun[0].key, "failed")
    assert slow.reason == "it was still running after 2s, --compile-time and its steps' time, and was killed"
    assert other.outcome == "ok"
    assert [request.key for request in begun] == [slow.key, other.key, other.key]
