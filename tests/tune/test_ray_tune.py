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
from train.config import TrainConfig
from train.model_config import ModelConfig
from tune.config import SearchConfig
from tune.plan import Search, make_search
from tune.ray_tune import ATTEMPTS, Listener, Proposals, Running, drive, outcome
from tune.space import Candidate
from tune.trial.row import Proposal, TrialRow, read_rows, write_row
from tune.trial.run import Request


@pytest.fixture
def search(small_shards: Path, small_model: ModelConfig, tmp_path: Path) -> Search:
    """A grid of two sizes."""
    training = TrainConfig(data=str(small_shards), model=small_model, global_batch=2, micro_batch=1, device="cpu")
    config = SearchConfig(
        training=training, searcher="grid", confirm=0, trial_steps=8, compile_time=1.0, out=tmp_path, name="one"
    )
    made = make_search(config)
    made.trials.mkdir(parents=True)
    return made


def proposals(search: Search) -> tuple[Proposals, list[Request]]:
    """Of ``search``, and what is begun."""
    begun: list[Request] = []
    return Proposals(search, Listener(begun.append, lambda row, rows: None)), begun


def test_a_trial_is_asked_for_as_the_search_says(search: Search, capfd: pytest.CaptureFixture[str]) -> None:
    """With more time after one that had too little, which is said."""
    searcher, _ = proposals(search)
    proposal = Proposal(Candidate(2), "probe")
    request = searcher.request(proposal, [])
    assert (request.key, request.number, request.folder) == (proposal.key("one"), 1, str(search.trials))
    assert (request.memory_limit, request.most_steps, request.most_seconds) == (search.limit, 8, 60.0)
    assert request.config == search.space.config(Candidate(2)).to_json() | {"data": str(search.data)}
    assert request.proposal.predicted_memory == search.memory.prior(Candidate(2)) > 0
    assert capfd.readouterr().out == ""
    row = TrialRow("m1", 1, "probe", 0, Candidate(1), 2, "failed", "", 1.0, too_short=True, step_seconds=[9.0, 10.0])
    again = searcher.request(Proposal(Candidate(1), "probe", 1), [row])
    assert (again.number, again.most_seconds) == (2, 140.0)
    assert "its steps get 2m20s, because --trial-time was too short" in capfd.readouterr().out


def test_a_row_that_never_arrives_ends_its_trial(search: Search) -> None:
    """As from a machine that writes into a folder of its own."""
    searcher, begun = proposals(search)
    for attempt in range(ATTEMPTS):
        assert read_rows(search.trials) == []
        assert searcher.suggest(f"trial-{attempt}") == {"request": begun[-1]}
        assert searcher.suggest("another") is None
        searcher.on_trial_complete(f"trial-{attempt}", {"outcome": "ok"})
    assert len({request.key for request in begun}) == 1
    (row,) = read_rows(search.trials)
    assert (row.key, row.outcome) == (begun[0].key, "failed")
    assert row.reason == f"it ran 3 times and its row did not arrive: can its process write to {search.trials}?"
    searcher.suggest("next")
    assert begun[-1].proposal.candidate != begun[0].proposal.candidate


@pytest.mark.parametrize(
    ("started", "reason"), [(True, "died 3 times"), (False, "could not be started, tried 3 times")]
)
def test_a_process_that_dies_is_begun_three_times(search: Search, started: bool, reason: str) -> None:
    searcher, begun = proposals(search)
    for attempt in range(ATTEMPTS):
        assert read_rows(search.trials) == []
        searcher.suggest(f"trial-{attempt}")
        if started:
            searcher.on_trial_result(f"trial-{attempt}", {"actor": None})
        searcher.on_trial_complete(f"trial-{attempt}", error=True)
    (row,) = read_rows(search.trials)
    assert (row.key, row.outcome) == (begun[0].key, "failed")
    assert reason in row.reason


def test_a_trial_that_died_once_has_the_row_of_its_second_attempt(search: Search) -> None:
    searcher, begun = proposals(search)
    searcher.suggest("first")
    searcher.on_trial_complete("first", error=True)
    searcher.suggest("second")
    candidate = begun[1].proposal.candidate
    row = TrialRow(begun[1].key, 1, "probe", 0, candidate, 1, "ok", "ran its 8 steps", 1.0, tokens_per_second=100.0)
    write_row(search.trials, row)
    searcher.on_trial_complete("second", {"outcome": "ok"})
    assert read_rows(search.trials) == [row]


def test_a_row_that_cannot_be_written_says_so_at_once(search: Search) -> None:
    """As on a machine without the search's folder."""
    searcher, begun = proposals(search)
    searcher.suggest("trial")
    elsewhere = replace(begun[0], folder=str(search.folder / "elsewhere"))
    searcher.on_trial_complete("trial", outcome(elsewhere))
    (row,) = read_rows(search.trials)
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


def test_a_trial_that_does_not_end_is_killed_and_one_that_was_killed_runs_again(search: Search, cluster: str) -> None:
    """The first step of one takes hours, as a compilation may; the other's process is killed from outside, once."""
    begun: list[Request] = []

    class Disturbed(Proposals):
        def request(self, proposal: Proposal, rows: Sequence[TrialRow]) -> Request:
            request = super().request(proposal, rows)
            if proposal.candidate.micro_batch == 1:
                return replace(request, config=request.config | {"global_batch": 10**6}, most_seconds=1.0)
            return replace(request, most_seconds=200.0)

        def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
            super().on_trial_result(trial_id, result)
            if len(begun) == 2:
                os.kill(result["pid"], signal.SIGKILL)

    with connected(cluster):
        drive(Disturbed(search, Listener(begun.append, lambda row, rows: None)))
    slow, other = read_rows(search.trials)
    assert (slow.key, slow.outcome) == (begun[0].key, "failed")
    assert slow.reason == "it was still running after 2s, --compile-time and its steps' time, and was killed"
    assert other.outcome == "ok"
    assert [request.key for request in begun] == [slow.key, other.key, other.key]
