"""The search on simulated GPUs: near the best, cheap, never over the limit, and a function of the rows alone."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from trial_rows import trial_row

from infra.device.hardware import A100, cpu_info
from train.config import TrainConfig
from train.model_config import PRESETS
from train.resolved import resolve
from tune.space import Candidate, Space, make_space
from tune.strategy.base import ConfirmBest, GridStrategy
from tune.strategy.memory_aware import MAX_CONTROL_LIMIT_MULTIPLE, REFINEMENTS, MemorySearcher
from tune.strategy.ranking import DOES_NOT_FIT
from tune.trial.row import TrialOutcome, TrialRow

BASE = TrainConfig.of(model=PRESETS["gpt2-124m"], global_batch=480, micro_batch=16, compile="whole", attention="sdpa")
CHECKPOINTING = "checkpointing=selective,full"


@pytest.fixture(scope="module")
def compare(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    """The comparison of searches, which has the simulated GPUs."""
    return benchmark("compare")


@pytest.fixture(scope="module")
def space() -> Space:
    compiled = "compile=off,blocks,whole,max-autotune,reduce-overhead"
    return make_space(resolve(BASE, A100), (compiled, "checkpointing=none,selective,full"))


@pytest.mark.parametrize("memory", ["ours", "ours, probed"])
@pytest.mark.parametrize("searched", ["two knobs", "two axes"])
def test_close_to_the_best_and_within_the_limit(compare: ModuleType, searched: str, memory: str) -> None:
    machines = [compare.machines()[f"simulated, {searched}"](seed) for seed in range(1000, 1008)]
    scores = [compare.score(memory, machine) for machine in machines]
    assert statistics.mean(s.regret for s in scores) < 0.005
    assert all(s.fits for s in scores)
    assert max(s.trials for s in scores) < 0.2 * len(machines[0].space.candidates())


def test_the_next_trial_follows_from_the_rows_alone(compare: ModuleType, space: Space) -> None:
    machine = compare.Simulated(space, 3)
    rows = compare.drive(compare.ours(machine), machine, race=True)
    for count in range(len(rows)):
        proposal = compare.ours(machine).propose(rows[:count])
        assert proposal is not None
        assert (proposal.candidate, proposal.stage, proposal.round) == (
            rows[count].candidate, rows[count].stage, rows[count].round,
        )  # fmt: skip
    keys = [(row.candidate, row.stage, row.round) for row in rows]
    assert len(set(keys)) == len(keys)


def test_no_more_trials_are_announced_than_there_are_candidates() -> None:
    space = make_space(resolve(TrainConfig.of(global_batch=8, micro_batch=8), cpu_info()), (CHECKPOINTING,))
    few = [Candidate(size, space.control.knobs) for size in (1, 2)]
    searcher = MemorySearcher(space, lambda candidate: 1e9 if candidate in few else 60e9, 40e9)
    assert searcher.remaining([]) == 2
    assert ConfirmBest(searcher, space, 1).remaining([]) == 4
    assert ConfirmBest(searcher, space, 0).remaining([]) == 2


@pytest.mark.parametrize("seed", [3, 16])
def test_what_was_not_run_has_a_true_reason(compare: ModuleType, space: Space, seed: int) -> None:
    """True of the rows and of the machine, which the search does not know."""
    machine = compare.Simulated(space, seed)
    searcher = MemorySearcher(space, machine.prior, machine.limit)
    rows = compare.drive(searcher, machine, race=True)
    curves = searcher.curves(rows)
    best = max(machine.speed(candidate) for candidate in space.candidates() if machine.fits(candidate))
    fastest = max(rows, key=lambda row: row.tokens_per_second or 0.0)

    def is_true(reason: str, candidate: Candidate) -> bool:
        ran = [row for row in rows if row.candidate.knobs == candidate.knobs]
        sizes = {row.candidate.micro_batch: row for row in ran}
        if reason == "a smaller micro-batch did not fit":
            return any(size < candidate.micro_batch and row.outcome in DOES_NOT_FIT for size, row in sizes.items())
        if reason == "predicted not to fit":
            return machine.memory(candidate) > 0.95 * machine.limit
        if reason == "none of its neighbors (one knob away) was ever the fastest":
            return not ran and candidate.knobs not in space.neighbors(fastest.candidate.knobs)
        if reason == "with these knobs, more than 3% slower than the fastest":
            return 0 < max(row.tokens_per_second or 0.0 for row in ran) < 0.97 * (fastest.tokens_per_second or 0.0)
        if reason == "predicted to be more than 3% slower than the fastest":
            return machine.speed(candidate) < 0.99 * best and min(sizes) < candidate.micro_batch < max(sizes)
        if reason == "smaller than the micro-batches that could win":
            return candidate.micro_batch < min(sizes) and machine.speed(candidate) < 0.97 * best
        assert reason == "enough micro-batches near it were tried"
        return machine.speed(candidate) < 1.005 * machine.speed(fastest.candidate)

    seen = {row.candidate for row in rows}
    reasons = {
        candidate: searcher.skip_reason(curves, candidate) for candidate in space.candidates() if candidate not in seen
    }
    assert [(candidate, why) for candidate, why in reasons.items() if not is_true(why, candidate)] == []
    assert len(set(reasons.values())) >= 6, "nearly all reasons are met"


def test_nothing_fits(space: Space) -> None:
    searcher = MemorySearcher(space, lambda candidate: 60e9, 40e9)
    assert searcher.propose([]) is None
    assert "predicted not to fit" in searcher.skip_reason(searcher.curves([]), space.control)


def finished(size: int, outcome: TrialOutcome, **measured: Any) -> TrialRow:
    """A trial of one size of :func:`plain`."""
    return trial_row(f"m{size}", 1, "probe", 0, Candidate(size), 1, outcome, "", 10.0, node="w1", **measured)


def plain(*knobs: str, batch: int = 64) -> MemorySearcher:
    """A search of sizes, and of ``knobs``, all of which are predicted to fit."""
    space = make_space(resolve(TrainConfig.of(global_batch=batch, micro_batch=8), cpu_info()), knobs)
    return MemorySearcher(space, lambda candidate: 1e9, 40e9)


def searched(searcher: MemorySearcher, speed: Callable[[Candidate], float]) -> list[TrialRow]:
    """All rows of a search in which each trial succeeds, at ``speed``."""
    rows: list[TrialRow] = []
    while (proposal := searcher.propose(rows)) is not None:
        fast = speed(proposal.candidate)
        row = finished(proposal.candidate.micro_batch, "ok", tokens_per_second=fast, low=fast, high=fast, memory=10**9)
        rows.append(replace(row, candidate=proposal.candidate, stage=proposal.stage))
    return rows


def test_the_bar_is_the_best_lower_end_of_an_interval() -> None:
    rows = [
        finished(8, "ok", tokens_per_second=100.0, low=99.0, high=101.0),
        finished(64, "ok", tokens_per_second=102.0, low=90.0, high=115.0),
        finished(32, "pruned", tokens_per_second=101.0, low=100.0, high=102.0),
    ]
    assert [
        proposal and proposal.speed_threshold for proposal in (plain().propose(rows[:1]), plain().propose(rows))
    ] == [99, 99]


def test_nothing_above_four_fifths_of_the_smaller_of_two_that_failed_is_proposed() -> None:
    rows = [finished(8, "ok", tokens_per_second=100.0, low=99.0, high=101.0, memory=10**9)]
    rows += [finished(32, "oom"), finished(16, "thrash")]
    while (proposal := plain().propose(rows)) is not None:
        assert proposal.candidate.micro_batch <= 0.8 * 16
        size = proposal.candidate.micro_batch
        rows.append(finished(size, "ok", tokens_per_second=90.0 + size, low=89.0, high=110.0, memory=10**9))
    assert len(rows) > 3


def test_the_grid_runs_everything_once(compare: ModuleType) -> None:
    space = make_space(resolve(BASE, A100), ())
    machine = compare.Simulated(space, 0)
    rows = compare.drive(GridStrategy(space), machine, race=False)
    assert [row.candidate for row in rows] == space.candidates()
    assert {"ok", "oom"} <= {row.outcome for row in rows}


def test_what_fails_everywhere_near_the_control_ends_the_search(compare: ModuleType, space: Space) -> None:
    searcher = compare.ours(compare.Simulated(space, 3)).explorer
    rows: list[TrialRow] = []
    while (proposal := searcher.propose(rows)) is not None:
        row = trial_row(
            str(len(rows)), len(rows), proposal.stage, 0, proposal.candidate, 1, "failed", "no driver", 10.0, node="w1"
        )  # fmt: skip
        rows.append(row)
    assert len(rows) == 1 + len(space.neighbors(space.control.knobs)) < len(space.combinations)


def test_sizes_near_the_top_are_refined_whole_tiles_first(compare: ModuleType) -> None:
    space = make_space(resolve(BASE, A100), ())
    machine = compare.Simulated(space, 4)
    rows = compare.drive(compare.ours(machine), machine, race=True)
    probes = [row.candidate.micro_batch for row in rows if row.stage == "probe"]
    refined = [row.candidate.micro_batch for row in rows if row.stage == "refine"]
    assert len(probes) >= 2
    assert 1 <= len(refined) <= 4
    assert all(min(probes) < size <= max(probes) for size in refined)
    assert refined[0] % 8 == 0


def test_of_equals_no_more_than_three_are_refined() -> None:
    rows = searched(plain(batch=480), lambda candidate: 100.0)
    assert [row.stage for row in rows].count("refine") == REFINEMENTS


def test_whole_tiles_come_before_what_is_expected_to_be_a_little_faster() -> None:
    searcher = MemorySearcher(plain(batch=120).space, lambda candidate: candidate.micro_batch * 1e9, 31e9)
    rows = [
        finished(8, "ok", tokens_per_second=99.0, memory=8 * 10**9),
        finished(10, "ok", tokens_per_second=100.0, memory=10 * 10**9),
        finished(30, "ok", tokens_per_second=97.5, memory=30 * 10**9),
    ]
    expected = {size: searcher.curves(rows).speed(Candidate(size)) or 0.0 for size in (12, 15, 20, 24)}
    assert min(expected, key=lambda size: expected[size]) == 24, "the only whole tile is the slowest"
    proposal = searcher.propose(rows)
    assert proposal
    assert (proposal.candidate.micro_batch, proposal.stage) == (24, "refine")


def test_what_is_expected_far_behind_the_best_is_not_tried() -> None:
    ends = [finished(size, "ok", tokens_per_second=speed) for size, speed in ((4, 50.0), (32, 99.0), (64, 100.0))]
    assert plain().propose(ends) is None
    curves = plain().curves(ends)
    assert plain().skip_reason(curves, Candidate(16)) == "predicted to be more than 3% slower than the fastest"


def test_a_combination_far_behind_the_best_is_tried_once_and_its_neighbors_not_at_all() -> None:
    searcher = plain(CHECKPOINTING, "attention=manual")
    own = searcher.space.control.knobs
    rows = searched(searcher, lambda candidate: 100.0 if candidate.knobs == own else 50.0)
    tried = [row.candidate.knobs for row in rows if row.candidate.knobs != own]
    assert sorted(tried) == sorted(searcher.space.neighbors(own))


def test_a_better_neighbor_is_followed_to_its_own() -> None:
    searcher = plain(CHECKPOINTING, "attention=manual")
    best = searcher.space.combinations[-1]
    rows = searched(
        searcher, lambda c: 100.0 + 10 * sum(a == b for a, b in zip(c.knobs, best, strict=True)) + c.micro_batch / 100
    )
    assert max(rows, key=lambda row: row.tokens_per_second or 0).candidate == Candidate(64, best)


def test_a_control_that_is_predicted_a_little_too_large_is_tried_anyway() -> None:
    space = plain().space
    large = MemorySearcher(space, lambda candidate: 1e9 * candidate.micro_batch, 8e9 / MAX_CONTROL_LIMIT_MULTIPLE)
    assert large.propose([]) == replace(large.propose([]), candidate=space.control)  # type: ignore[type-var]
    hopeless = replace(large, limit=7.9e9 / MAX_CONTROL_LIMIT_MULTIPLE).propose([])
    assert hopeless
    assert hopeless.candidate == Candidate(4)


def test_a_control_that_fits_after_all_runs_to_its_end() -> None:
    """It was taken for too large until another size took less; no bar ends what all are compared with."""
    searcher = MemorySearcher(
        plain().space, lambda candidate: 1e9 * candidate.micro_batch, 7.9e9 / MAX_CONTROL_LIMIT_MULTIPLE
    )
    row = finished(4, "ok", tokens_per_second=100.0, low=99.0, high=101.0, memory=10**9)
    proposal = searcher.propose([row])
    assert proposal
    assert (proposal.candidate, proposal.speed_threshold) == (searcher.space.control, None)


def test_knobs_whose_trial_failed_are_given_up() -> None:
    searcher = plain(CHECKPOINTING)
    own = searcher.space.control.knobs
    failed = replace(finished(8, "failed"), candidate=searcher.space.control)
    proposal = searcher.propose([failed])
    assert proposal
    assert proposal.candidate.knobs != own
