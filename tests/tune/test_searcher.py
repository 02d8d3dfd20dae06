"""The search on simulated GPUs: near the best, cheap, never over the limit, and a function of the rows alone."""

import importlib
import statistics
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from train.config import PRESETS, TrainConfig
from tune.searcher import MemorySearcher
from tune.space import Space, make_space
from tune.strategies import Grid

BASE = TrainConfig(model=PRESETS["gpt2-124m"], global_batch=480, micro_batch=16, compile="whole", attention="sdpa")


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The benchmark of the searches, which has the simulated GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks" / "search")
        yield importlib.import_module("compare")


@pytest.fixture(scope="module")
def space() -> Space:
    return make_space(BASE, ("compile", "checkpointing"), device="cuda")


def test_close_to_the_best_and_within_the_limit(benchmark: ModuleType, space: Space) -> None:
    scores = [benchmark.score("ours", benchmark.Simulated(space, seed)) for seed in range(1000, 1008)]
    assert statistics.mean(s.regret for s in scores) < 0.005
    assert all(s.fits for s in scores)
    assert max(s.trials for s in scores) < 0.2 * len(space.candidates())


def test_the_next_trial_follows_from_the_rows_alone(benchmark: ModuleType, space: Space) -> None:
    machine = benchmark.Simulated(space, 3)
    rows = benchmark.drive(benchmark.ours(machine), machine, race=True)
    for count in range(len(rows)):
        proposal = benchmark.ours(machine).propose(rows[:count])
        assert proposal is not None
        assert (proposal.candidate, proposal.stage, proposal.round) == (
            rows[count].candidate, rows[count].stage, rows[count].round,
        )  # fmt: skip
    keys = [(row.candidate, row.stage, row.round) for row in rows]
    assert len(set(keys)) == len(keys)


def test_what_was_not_run_has_a_reason(benchmark: ModuleType, space: Space) -> None:
    machine = benchmark.Simulated(space, 5)
    searcher = MemorySearcher(space, machine.prior, machine.limit)
    rows = benchmark.drive(searcher, machine, race=True)
    seen = {row.candidate for row in rows}
    assert all(searcher.why_not(rows, candidate) for candidate in space.candidates() if candidate not in seen)


def test_nothing_fits(space: Space) -> None:
    searcher = MemorySearcher(space, lambda candidate: 60e9, 40e9)
    assert searcher.propose([]) is None
    assert "predicted not to fit" in searcher.why_not([], space.control)


def test_the_grid_runs_everything_once(benchmark: ModuleType) -> None:
    space = make_space(BASE, (), device="cuda")
    machine = benchmark.Simulated(space, 0)
    rows = benchmark.drive(Grid(space), machine, race=False)
    assert [row.candidate for row in rows] == space.candidates()
    assert {"ok", "oom"} <= {row.outcome for row in rows}
