"""What is repeated: a trial with too little time once, and the best in rounds of alternating order."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from trial_rows import changed, trial_row

from infra.device.hardware import cpu_info
from train.config import Cycle, TrainConfig
from train.model_config import ModelConfig
from train.resolved import resolve
from tune.config import MIN_MEASURED_STEPS
from tune.space import Candidate, make_space
from tune.strategy.base import ConfirmBest, GridStrategy, RetryShortTrials, trial_time_limit
from tune.strategy.memory_aware import MemorySearcher
from tune.trial.row import Proposal, Stage, TrialRow
from tune.trial.run import StopRule, TrialRequest, run

SPACE = make_space(resolve(TrainConfig.of(global_batch=8, micro_batch=8), cpu_info()), ())


def row(size: int, *, stage: Stage = "probe", round: int = 0, speed: float = 100.0) -> TrialRow:
    """A trial that measured ``speed`` within three percent."""
    return trial_row(
        f"m{size}-{stage}-{round}", 1, stage, round, Candidate(size), 8 // size, "ok", "", 10.0,
        tokens_per_second=speed, low=0.97 * speed, high=1.03 * speed, memory=size * 10**9, node="w1",
    )  # fmt: skip


def short(size: int, *, round: int = 0, step: float = 2.0) -> TrialRow:
    """A trial whose time was too short for a speed."""
    bare = changed(row(size, round=round), tokens_per_second=None, low=None, high=None)
    return replace(bare, outcome="failed", ended_too_early=True, step_seconds=[9.0, step, step])


def test_a_trial_with_too_little_time_runs_once_more_with_enough(
    small_shards: Path, small_model: ModelConfig, tmp_path: Path
) -> None:
    """Real trials, the first with no time at all: the search continues with the other sizes."""
    config = TrainConfig.of(data=str(small_shards), model=small_model, global_batch=4, micro_batch=1, device="cpu")
    space = make_space(resolve(config, cpu_info()), ())
    strategy = RetryShortTrials(MemorySearcher(space, lambda candidate: 1e9, 8e9))
    rows: list[TrialRow] = []
    while (proposal := strategy.propose(rows)) is not None:
        trial = space.config(proposal.candidate).replace(steps=20, cycle=Cycle(1, 0))
        time_limit = trial_time_limit(rows, 0.0)
        key, number = proposal.key("search"), len(rows) + 1
        row, _ = run(TrialRequest(key, number, "m1", proposal, trial, "here", 8 * 10**9, StopRule(time_limit, 0.01)))
        rows.append(row)
        assert time_limit == (
            0.0 if len(rows) == 1 else 2 * (MIN_MEASURED_STEPS + 2) * statistics.median(rows[0].step_seconds[1:])
        )
    first, second, *remaining_rows = rows
    assert (first.outcome, first.ended_too_early, first.round) == ("failed", True, 0)
    assert (second.outcome, second.round) == ("ok", 1)
    assert second.candidate == first.candidate
    assert second.key != first.key
    assert remaining_rows
    assert {row.outcome for row in remaining_rows} <= {"ok", "pruned"}
    assert all(row.round == 0 for row in remaining_rows)


def test_a_trial_is_repeated_once() -> None:
    strategy = RetryShortTrials(GridStrategy(SPACE))
    first = strategy.propose([short(1)])
    assert first
    assert (first.candidate, first.stage, first.round) == (Candidate(1), "probe", 1)
    second = strategy.propose([short(1), short(1, round=1)])
    assert second
    assert (second.candidate, second.round) == (Candidate(2), 0)
    assert strategy.remaining([short(1)]) == 1 + 3
    assert strategy.remaining([short(1), short(1, round=1)]) == 3


def test_a_trial_that_failed_for_another_reason_is_not_repeated() -> None:
    proposal = RetryShortTrials(GridStrategy(SPACE)).propose([replace(short(1), ended_too_early=False)])
    assert proposal
    assert (proposal.candidate, proposal.round) == (Candidate(2), 0)


def test_a_search_whose_time_stays_too_short_ends() -> None:
    strategy = ConfirmBest(RetryShortTrials(MemorySearcher(SPACE, lambda candidate: 1e9, 8e9)), SPACE, 1)
    assert strategy.propose([short(8), short(8, round=1)]) is None


def test_the_longest_time_that_trials_needed_holds_for_the_rest() -> None:
    assert trial_time_limit([row(1)], 60.0) == 60.0
    assert trial_time_limit([row(1), short(2, step=10.0), short(2, round=1, step=20.0)], 60.0) == 280.0
    assert trial_time_limit([short(2)], 60.0) == 60.0


def test_every_second_round_of_confirmations_runs_in_the_opposite_order() -> None:
    """Also each has keys of its own, so that no round's rows replace another's."""
    strategy = ConfirmBest(GridStrategy(SPACE), SPACE, 3)
    rows = [row(size, speed=speed) for size, speed in ((1, 80), (2, 100), (4, 101), (8, 99))]
    keys: dict[int, list[str]] = {}
    order: dict[int, list[int]] = {}
    while (proposal := strategy.propose(rows)) is not None:
        size = proposal.candidate.micro_batch
        order.setdefault(proposal.round, []).append(size)
        keys.setdefault(proposal.round, []).append(proposal.key("search"))
        confirmed = row(size, stage="confirm", round=proposal.round, speed={2: 101, 4: 100, 8: 99}[size])
        rows.append(changed(confirmed, low=80.0, high=120.0))
    assert list(order) == [1, 2, 3]
    assert order[1] == [4, 2, 8]
    assert order[2] == [8, 4, 2]
    assert order[3] == [2, 4, 8]
    assert len({key for each in keys.values() for key in each}) == 9


def test_the_exploration_does_not_see_confirmations() -> None:
    """They would take the places of its refinements, and their drift would bend its curves."""

    @dataclass(frozen=True)
    class Watched(GridStrategy):
        def propose(self, rows: Sequence[TrialRow]) -> Proposal | None:
            assert {row.stage for row in rows} <= {"probe"}
            return super().propose(rows)

    strategy = ConfirmBest(Watched(SPACE), SPACE, 2)
    rows = [row(size) for size in (1, 2, 4, 8)]
    rows.append(row(1, stage="confirm", round=1))
    assert strategy.propose(rows)
    assert strategy.remaining(rows) == 3


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_as_many_rounds_as_were_asked_for(rounds: int) -> None:
    strategy = ConfirmBest(GridStrategy(SPACE), SPACE, rounds)
    rows = [row(size) for size in (1, 2, 4, 8)]
    ran = []
    while (proposal := strategy.propose(rows)) is not None:
        ran.append(proposal.round)
        wide = row(proposal.candidate.micro_batch, stage="confirm", round=proposal.round)
        rows.append(changed(wide, low=50.0, high=200.0))
    assert ran == [number for number in range(1, rounds + 1) for _ in range(4)], "the best three and the control"
