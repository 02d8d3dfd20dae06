"""Rows on disk: one file a trial, under a key that no other trial of the search has."""

from dataclasses import replace
from pathlib import Path

from trial_rows import changed, trial_row

from tune.space import Candidate
from tune.trial.row import Proposal, TrialRow, read_rows, rows_with_speed, write_row

PROPOSAL = Proposal(Candidate(8, (("compile", "off"),)), "confirm", 1)


def row(proposal: Proposal, number: int) -> TrialRow:
    return trial_row(
        proposal.key("search"), number, proposal.stage, proposal.round, proposal.candidate, 1, "ok", "", 10.0,
        tokens_per_second=100.0, step_seconds=[1.0, 0.5], node="w1",
    )  # fmt: skip


def test_every_trial_has_a_key_of_its_own() -> None:
    other_proposals = [
        replace(PROPOSAL, round=2),
        replace(PROPOSAL, stage="probe"),
        replace(PROPOSAL, candidate=Candidate(4, PROPOSAL.candidate.knobs)),
        replace(PROPOSAL, candidate=Candidate(8, (("compile", "whole"),))),
        replace(PROPOSAL, node="one"),
        replace(PROPOSAL, node="two"),
    ]
    assert (
        len({PROPOSAL.key("search"), PROPOSAL.key("other"), *(other.key("search") for other in other_proposals)}) == 8
    )


def test_a_trial_keeps_its_key_whatever_was_predicted_of_it() -> None:
    """A resumed search predicts anew, and must find the trial's run in MLflow again."""
    predicted = replace(PROPOSAL, predicted_memory=1e9, predicted_speed=5.0, speed_threshold=4.0)
    assert predicted.key("search") == PROPOSAL.key("search")


def test_every_round_of_confirmations_is_kept_in_the_order_of_its_trials(tmp_path: Path) -> None:
    rounds = [row(replace(PROPOSAL, round=number), number) for number in range(1, 6)]
    for each in rounds:
        write_row(tmp_path, each)
    assert read_rows(tmp_path) == rounds
    assert sorted(row.key for row in rounds) != [row.key for row in rounds], "the order of the files is another"


def test_only_what_ran_within_the_limit_can_win() -> None:
    ok = row(PROPOSAL, 1)
    stopped = replace(ok, outcome="pruned")
    unfit = [replace(ok, outcome=outcome) for outcome in ("over_limit", "oom", "thrash", "failed")]
    assert rows_with_speed([ok, *unfit, stopped, changed(ok, tokens_per_second=None)]) == [ok, stopped]
