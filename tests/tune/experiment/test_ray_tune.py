"""Every trial gets a row: its own, or the driver's where it died, did not end, or could not be run."""

import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trial_rows import trial_row

from infra.ray.cluster import ray_session
from train.config import Cycle, ResolvedConfig, TrainConfig
from train.model_config import ModelConfig
from tune.config import SearchConfig
from tune.experiment.machines import trial_nodes
from tune.experiment.ray_tune import ATTEMPTS, ExperimentSearcher, RunningTrial, run_tuner
from tune.experiment.search_plan import Search, make_search
from tune.space import Candidate
from tune.trial.row import Proposal, TrialRow, read_rows
from tune.trial.run import StopRule, TrialRequest, run


@pytest.fixture
def search(small_shards: Path, small_model: ModelConfig, tmp_path: Path) -> Search:
    """A grid of two sizes."""
    training = TrainConfig.of(data=str(small_shards), model=small_model, global_batch=2, micro_batch=1, device="cpu")
    config = SearchConfig(
        training=training, searcher="grid", confirm_rounds=0, trial_steps=8, compile_time=1.0, out=str(tmp_path),
        name="one",
    )  # fmt: skip
    made = make_search(config)
    made.trials.mkdir(parents=True)
    return made


HERE = "here"


def proposals(search: Search, nodes: Mapping[str, str] | None = None) -> tuple[ExperimentSearcher, list[TrialRequest]]:
    """Of ``search`` on the machine ``HERE`` or on ``nodes``, and what is begun."""
    requests: list[TrialRequest] = []
    there = {HERE: "its id"} if nodes is None else nodes
    machines = tuple(replace(search.machines[0], name=name) for name in there)
    on = replace(search, machines=machines, config=replace(search.config, max_concurrent_trials=len(there)))
    return ExperimentSearcher(
        on, [], lambda: there, requests.append, lambda row: None, oom_kills=lambda node: 3
    ), requests


def row_of(request: TrialRequest, speed: float | None = None) -> TrialRow:
    """What the trial of ``request`` sends when it ran, at ``speed`` tokens per second."""
    proposal = request.proposal
    return trial_row(
        request.key, request.number, proposal.stage, proposal.round, proposal.candidate, 1, "ok", "ran 8 steps", 1.0,
        tokens_per_second=speed, low=speed and 0.99 * speed, high=speed and 1.01 * speed, node=request.node,
    )  # fmt: skip


def sent(row: TrialRow) -> dict[str, Any]:
    return {"row": row, "traceback": None}


def test_a_trial_is_asked_for_as_the_search_says(search: Search, capfd: pytest.CaptureFixture[str]) -> None:
    """With more time after one that had too little, which is said."""
    proposal = Proposal(Candidate(2), "probe")
    request = search.trial(proposal, HERE, 1, [])
    assert (request.key, request.number, request.node) == (proposal.key("one"), 1, HERE)
    assert (request.memory_limit, request.stop_rule, request.timeout) == (search.limit, StopRule(60.0, 0.01), 61.0)
    trial = search.space.config(Candidate(2)).replace(data=str(search.data), steps=8, cycle=Cycle(1, 0))
    assert request.config == trial, "however long the training is"
    assert request.proposal.predicted_memory == search.memory.prior(Candidate(2)) > 0
    assert capfd.readouterr().out == ""
    row = trial_row(
        "m1", 1, "probe", 0, Candidate(1), 2, "failed", "", 1.0, node=HERE, ended_too_early=True,
        step_seconds=[9.0, 10.0],
    )  # fmt: skip
    again = search.trial(Proposal(Candidate(1), "probe", 1), HERE, 2, [row])
    assert again.stop_rule == StopRule(140.0, 0.01)
    assert "--trial-time was too short; this trial has a limit of 2m20s" in capfd.readouterr().out


def test_a_trial_that_cannot_be_run_ends_after_three_attempts(search: Search) -> None:
    """As on a machine that does not reach the data's storage."""
    searcher, requests = proposals(search)
    for attempt in range(ATTEMPTS):
        assert read_rows(search.trials) == []
        assert searcher.suggest(f"trial-{attempt}") == {"request": requests[-1], "node": "its id"}
        assert searcher.suggest("another") is None
        searcher.on_trial_complete(f"trial-{attempt}", {"refused": "s3://away cannot be read"})
    assert len({request.key for request in requests}) == 1
    (row,) = read_rows(search.trials)
    assert (row.key, row.outcome, row.node) == (requests[0].key, "failed", HERE)
    assert row.reason == "s3://away cannot be read"
    searcher.suggest("next")
    assert requests[-1].proposal.candidate != requests[0].proposal.candidate


@pytest.mark.parametrize(("started", "reason"), [(True, "crashed 3 times"), (False, "failed to start 3 times")])
def test_a_process_that_dies_is_begun_three_times(search: Search, started: bool, reason: str) -> None:
    searcher, requests = proposals(search)
    for attempt in range(ATTEMPTS):
        assert read_rows(search.trials) == []
        searcher.suggest(f"trial-{attempt}")
        if started:
            searcher.on_trial_result(f"trial-{attempt}", {"actor": None, "oom_kills": 3})
        searcher.on_trial_complete(f"trial-{attempt}", error=True)
    (row,) = read_rows(search.trials)
    assert (row.key, row.outcome) == (requests[0].key, "failed")
    assert reason in row.reason


def test_a_process_that_was_killed_for_memory_is_an_outcome_and_is_not_begun_again(search: Search) -> None:
    """What its configuration does, and would do again; the machine counts such kills."""
    searcher, requests = proposals(search)
    searcher.suggest("trial")
    searcher.on_trial_result("trial", {"actor": None, "oom_kills": 2})
    searcher.on_trial_complete("trial", error=True)
    (row,) = read_rows(search.trials)
    assert (row.key, row.outcome, row.node) == (requests[0].key, "oom", HERE)
    assert "memory" in row.reason
    searcher.suggest("next")
    assert requests[-1].proposal.candidate != requests[0].proposal.candidate


def test_a_trial_that_died_once_has_the_row_of_its_second_attempt(search: Search) -> None:
    searcher, requests = proposals(search)
    searcher.suggest("first")
    searcher.on_trial_complete("first", error=True)
    searcher.suggest("second")
    searcher.on_trial_complete("second", sent(row_of(requests[1], 100.0)))
    (row,) = read_rows(search.trials)
    assert replace(row, seconds=1.0) == row_of(requests[1], 100.0)


def test_the_driver_writes_a_trials_row_and_traceback(search: Search) -> None:
    """The trial itself writes nothing: it may run on a machine without the search's folder."""
    searcher, requests = proposals(search)
    searcher.suggest("trial")
    broken = replace(requests[0], config=requests[0].config.replace(data=str(search.folder / "elsewhere")))
    row, _ = run(broken)
    assert list(search.trials.iterdir()) == []
    searcher.on_trial_complete("trial", sent(row))
    (row,) = read_rows(search.trials)
    assert (row.outcome, row.node) == ("failed", HERE)
    assert "elsewhere" in row.reason
    assert not (search.trials / f"{row.key}.txt").exists(), "a traceback is for our bugs"
    searcher.suggest("next")
    searcher.on_trial_complete("next", sent(row_of(requests[1])) | {"traceback": "of a bug"})
    assert (search.trials / f"{requests[1].key}.txt").read_text() == "of a bug"


def test_a_trial_whose_machine_is_lost_runs_again_without_counting(
    search: Search, capfd: pytest.CaptureFixture[str]
) -> None:
    nodes = {"w1": "1", "w2": "2"}
    searcher, requests = proposals(search, nodes)
    for attempt in range(ATTEMPTS + 1):
        searcher.suggest(f"trial-{attempt}")
        (lost_node,) = {"w1", "w2"} & {requests[-1].node}
        back = nodes.pop(lost_node)
        searcher.on_trial_complete(f"trial-{attempt}", error=True)
        nodes[lost_node] = back + "'"
    assert read_rows(search.trials) == []
    assert "Trial 1: lost the machine w1. Retrying." in capfd.readouterr().err
    nodes.clear()
    assert searcher.suggest("nowhere") == "FINISHED", "the driver waits for a machine, where Tune would not take Ctrl-C"
    assert searcher.restart_tuner


def test_no_trial_is_proposed_twice_and_each_machine_has_its_own_control(search: Search) -> None:
    """w2 is half as fast as w1, and what ran there counts as much."""
    searcher, requests = proposals(search, {"w1": "1", "w2": "2"})
    searcher.suggest("a")
    assert searcher.suggest("b") is None, "there is nothing yet that another machine could be compared with"
    searcher.on_trial_complete("a", sent(row_of(requests[0], 1000.0)))
    searcher.suggest("c")
    searcher.suggest("d")
    first, second, control = requests
    assert [(r.node, r.proposal.stage, r.number) for r in requests] == [
        ("w1", "probe", 1), ("w1", "probe", 2), ("w2", "control", 3)
    ]  # fmt: skip
    assert control.proposal.candidate == first.proposal.candidate != second.proposal.candidate
    assert len({request.key for request in requests}) == 3
    assert searcher.suggest("e") is None
    searcher.on_trial_complete("d", sent(row_of(control, 500.0)))
    assert searcher.suggest("e") is None, "the only other candidate is running"
    searcher.on_trial_complete("c", sent(row_of(second, 1100.0)))
    assert searcher.suggest("f") == "FINISHED"
    assert not searcher.restart_tuner
    assert [row.number for row in read_rows(search.trials)] == [1, 2, 3]


def test_a_process_is_killed_when_its_time_is_up_and_never_after_its_end() -> None:
    killed = {"late": threading.Event(), "in time": threading.Event()}
    for name, timeout in (("late", 0.05), ("in time", 2.0)):
        trial = RunningTrial(
            TrialRequest("m1", 1, "m1", Proposal(Candidate(1), "probe"), ResolvedConfig(), HERE, timeout=timeout)
        )
        time.sleep(0.1)  # waiting for a process does not count
        assert not trial.overdue
        trial.start_timeout(killed[name].set)
        if name == "in time":
            trial.cancel_timeout()
        assert killed[name].wait(60 if name == "late" else 2.5) == trial.overdue == (name == "late")


def test_a_trial_on_a_slower_machine_is_expected_to_be_as_slow(search: Search) -> None:
    """Both the speed that is predicted and the one below which it cannot win, by what the controls took there."""
    first = row_of(TrialRequest("m1", 1, "m1", Proposal(Candidate(1), "probe"), ResolvedConfig(), "w1"), 1000.0)
    control = row_of(TrialRequest("c2", 2, "m1", Proposal(Candidate(1), "control"), ResolvedConfig(), "w2"), 500.0)
    proposal = Proposal(Candidate(2), "probe", predicted_speed=1200.0, speed_threshold=1100.0)
    for node, factor in (("w1", 1), ("w2", 2), ("w3", 1)):
        found = search.trial(proposal, node, 3, [first, control]).proposal
        assert (found.predicted_speed, found.speed_threshold) == (1200.0 / factor, 1100.0 / factor), node


@pytest.mark.slow
def test_a_trial_that_does_not_end_is_killed_and_one_that_was_killed_runs_again(search: Search, cluster: str) -> None:
    """The first step of one takes hours, as a compilation may; the other's process is killed from outside, once."""
    requests: list[TrialRequest] = []

    class Slow(Search):
        def trial(self, proposal: Proposal, machine: str, number: int, rows: Sequence[TrialRow]) -> TrialRequest:
            request = super().trial(proposal, machine, number, rows)
            if proposal.candidate.micro_batch == 1:
                return replace(request, config=request.config.replace(global_batch=10**6), timeout=2.0)
            return replace(request, timeout=201.0)

    class Disturbed(ExperimentSearcher):
        def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
            super().on_trial_result(trial_id, result)
            if len(requests) == 2:
                os.kill(result["pid"], signal.SIGKILL)

    with ray_session(cluster):
        resources = search.resources()
        nodes = partial(trial_nodes, resources)
        slowed = Slow(**{field.name: getattr(search, field.name) for field in fields(search)})
        run_tuner(Disturbed(slowed, [], nodes, requests.append, lambda row: None), resources)
    slow, other = read_rows(search.trials)
    assert (slow.key, slow.outcome) == (requests[0].key, "failed")
    assert re.search(r"killed after 2s.*--compile-time", slow.reason)
    assert other.outcome == "ok"
    assert [request.key for request in requests] == [slow.key, other.key, other.key]
