"""Optuna as a searcher: its study follows from the rows alone, and nothing is run twice."""

import statistics
from collections.abc import Callable
from types import ModuleType

from infra.device.hardware import A100
from train.config import TrainConfig
from train.model_config import PRESETS
from train.resolved import resolve
from tune.space import make_space
from tune.strategy.optuna_tpe import OptunaSearcher

BASE = TrainConfig.of(model=PRESETS["gpt2-124m"], global_batch=480, micro_batch=16, compile="whole", attention="sdpa")


def test_no_candidate_runs_twice_and_the_budget_holds(benchmark: Callable[[str], ModuleType]) -> None:
    compare = benchmark("compare")
    machine = compare.Simulated(make_space(resolve(BASE, A100), ("checkpointing=none,selective,full",)), 1)
    searcher = OptunaSearcher(machine.space, trials=12)
    assert searcher.remaining([]) == 12
    rows = compare.drive(searcher, machine, race=False)
    assert len({row.candidate for row in rows}) == len(rows) == 12
    assert searcher.remaining(rows) == 0


def test_a_small_space_is_tried_whole(benchmark: Callable[[str], ModuleType]) -> None:
    compare = benchmark("compare")
    space = make_space(resolve(TrainConfig.of(global_batch=6, micro_batch=2), A100), ())
    rows = compare.drive(OptunaSearcher(space, trials=50), compare.Simulated(space, 1), race=False)
    assert {row.candidate for row in rows} == set(space.candidates())


def test_the_next_trial_follows_from_the_rows_alone(benchmark: Callable[[str], ModuleType]) -> None:
    compare = benchmark("compare")
    machine = compare.Simulated(make_space(resolve(BASE, A100), ("checkpointing=none,selective,full",)), 2)
    rows = compare.drive(OptunaSearcher(machine.space, trials=6), machine, race=False)
    again = [OptunaSearcher(machine.space, trials=6).propose(rows[:count]) for count in range(len(rows))]
    assert [proposal and proposal.candidate for proposal in again] == [row.candidate for row in rows]


def test_faster_candidates_are_sought(benchmark: Callable[[str], ModuleType]) -> None:
    compare = benchmark("compare")
    machine = compare.Simulated(make_space(resolve(BASE, A100), ("checkpointing=none,selective,full",)), 1, limit=1e15)
    rows = compare.drive(OptunaSearcher(machine.space, trials=30), machine, race=False)
    speeds = [row.tokens_per_second or 0.0 for row in rows]
    assert statistics.mean(speeds[10:20]) > statistics.mean(speeds[:10]), "ten are drawn at random"
