"""The replay of searches charges what they train and judges what they choose, on a grid of known laws."""

import dataclasses
import importlib.util
import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from infra.schema import from_json, to_json

FILE = Path(__file__).with_name("replay.py")
RUNGS = [2.0**-n for n in range(5, -1, -1)]
FULL = 2**20
LAST = len(RUNGS) - 1


@pytest.fixture(scope="module")
def replay() -> Any:
    spec = importlib.util.spec_from_file_location("learning_replay", FILE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def true_loss(cell: Any, tokens: float) -> float:
    """A law whose best rate and batch depend on the optimizer; large batches learn slowly at first."""
    rate = {"adamw-fused": 2e-3, "muon": 1e-3}[cell.optimizer]
    detour = 0.1 * math.log2(cell.learning_rate / rate) ** 2 + 0.05 * math.log2(cell.global_batch / 4) ** 2
    floor = 2.0 + 0.02 * (cell.optimizer == "adamw-fused")
    return floor + (1 + detour) * (tokens / (FULL / 32)) ** -0.3


@pytest.fixture(scope="module")
def grid(replay: Any) -> Any:
    """Four rates, four batches and two optimizers with three seeds; small batches take more time per token."""
    draw = random.Random(0)
    speeds = [
        replay.Speed(batch, optimizer, 1e-4 * (1 + 0.3 / batch))
        for batch in (1, 2, 4, 8)
        for optimizer in ("adamw-fused", "muon")
    ]
    cells = [replay.Cell(rate, s.global_batch, s.optimizer) for s in speeds for rate in (5e-4, 1e-3, 2e-3, 4e-3)]
    runs = [
        replay.Run(cell, seed, [(round(f * FULL), true_loss(cell, f * FULL) + draw.gauss(0, 0.003)) for f in RUNGS])
        for seed in range(3)
        for cell in cells
    ]
    return replay.Grid(RUNGS, 0.8, 5.5, speeds, runs)


def test_a_grid_is_stored_and_read(replay: Any, grid: Any) -> None:
    assert from_json(replay.Grid, json.loads(json.dumps(to_json(grid))), "grid") == grid


def test_losses_at_a_time_are_those_of_the_cells_own_speed(replay: Any, grid: Any) -> None:
    """All cells are compared at the time of the fastest one, at which slower ones have had fewer tokens."""
    assert grid.full_seconds == pytest.approx(FULL * 1e-4 * (1 + 0.3 / 8))
    slow = replay.Cell(2e-3, 1, "muon")
    tokens = FULL * (1 + 0.3 / 8) / 1.3
    assert grid.mean_loss(slow, LAST) == pytest.approx(true_loss(slow, tokens), abs=0.02)
    fast = replay.Cell(2e-3, 8, "muon")
    assert grid.loss(fast, 0, LAST) == pytest.approx(true_loss(fast, FULL), abs=0.02)
    loss = grid.mean_loss(fast, LAST - 1)
    assert grid.seconds_to(fast, loss) == pytest.approx(grid.full_seconds / 2)
    assert grid.seconds_to(fast, 1.0) == replay.MAX_TIME_RATIO * grid.full_seconds


def test_a_trial_is_charged_for_its_trunk_once_and_for_each_branch(replay: Any, grid: Any) -> None:
    session, cell = replay.Session(grid, [LAST], 0), grid.cells[0]
    first = session.train(cell, 0)
    assert first == grid.loss(cell, 0, 0)
    assert session.seconds == pytest.approx(grid.full_seconds / 32)
    session.train(cell, 0)
    session.train(cell, 2)
    assert session.seconds == pytest.approx(grid.full_seconds * (0.8 / 8 + 0.2 / 8 + 0.2 / 32))
    session.train(cell, 2, seed=1)
    assert session.seconds == pytest.approx(grid.full_seconds * (2 * 0.8 / 8 + 2 * 0.2 / 8 + 0.2 / 32))


@pytest.mark.parametrize("durations", [[LAST], [LAST - 2, LAST - 1, LAST]])
def test_competitors_keep_to_their_budget_and_the_grid_finds_nearly_the_best(
    replay: Any, grid: Any, durations: list[int]
) -> None:
    judged = [
        score
        for name, competitor in replay.COMPETITORS.items()
        for repeat in range(3)
        for score in replay.scores(grid, name, competitor, durations, repeat)
    ]
    assert {score.duration for score in judged} == {RUNGS[rung] for rung in durations}
    for score in judged:
        assert 1 - 1e-9 <= score.time_ratio <= replay.MAX_TIME_RATIO / score.duration
        assert score.excess_loss >= 0
        if score.competitor == "grid":
            assert score.cost == pytest.approx(1)
            assert score.excess_loss < 0.01
        else:
            assert 0.1 < score.cost < replay.BUDGET + 2 / len(grid.cells)
    table = replay.summary_table("title", judged)
    assert table.row_count == len(replay.COMPETITORS) * len(durations)


def test_asha_stops_slow_learners_and_tries_more_cells_than_random_search(replay: Any, grid: Any) -> None:
    sessions = {name: replay.Session(grid, [LAST], 0) for name in ("random", "ASHA (Ray Tune)")}
    for name, session in sessions.items():
        replay.COMPETITORS[name](session, random.Random(0))
    tried = {name: len(session.losses) for name, session in sessions.items()}
    assert tried["ASHA (Ray Tune)"] > 1.5 * tried["random"]
    assert {max(losses) for losses in sessions["ASHA (Ray Tune)"].losses.values()} > {LAST}


def test_a_run_that_diverged_is_never_chosen_and_never_reaches_a_loss(replay: Any, grid: Any) -> None:
    best = min(grid.cells, key=lambda cell: grid.mean_loss(cell, LAST))
    runs = [replay.Run(run.cell, run.seed, run.losses[:3]) if run.cell == best else run for run in grid.runs]
    diverged = dataclasses.replace(grid, runs=runs)
    assert diverged.mean_loss(best, LAST) == math.inf
    assert diverged.mean_loss(best, 1) == grid.mean_loss(best, 1)
    assert diverged.seconds_to(best, 3.0) == replay.MAX_TIME_RATIO * diverged.full_seconds
    for name, competitor in replay.COMPETITORS.items():
        (score,) = replay.scores(diverged, name, competitor, [LAST], 0)
        assert score.cell != best


def test_the_goal_is_of_time_and_cost_at_the_full_duration(replay: Any, grid: Any) -> None:
    def score(duration: float, ratio: float, cost: float) -> Any:
        return replay.Score("search", 0, duration, grid.cells[0], ratio, 0.0, cost)

    assert replay.is_goal_met([score(1.0, 1.0, 0.2), score(1.0, 1.08, 0.2), score(0.5, 3.0, 0.2)])
    assert not replay.is_goal_met([score(1.0, 1.2, 0.2)])
    assert not replay.is_goal_met([score(1.0, 1.0, 0.3)])


@pytest.mark.parametrize("seeds", [[0], [0, 1, 2]])
def test_extrapolation_from_a_quarter_of_the_time_holds_known_laws(replay: Any, grid: Any, seeds: list[int]) -> None:
    result = replay.extrapolate(grid, seeds)
    assert result.held >= 0.9
    assert result.median_error < result.median_width < 0.3


def test_the_complete_part_of_a_partial_grid_has_every_seed_of_every_cell(replay: Any, grid: Any) -> None:
    """A batch that lacks one rate, and optimizers that have not been trained with every seed, are left out."""

    def is_recorded(run: Any) -> bool:
        if run.seed or run.cell.optimizer == "muon":
            return False
        return run.cell.global_batch != 1 or run.cell.learning_rate != 5e-4

    runs = [run for run in grid.runs if is_recorded(run)]
    partial = dataclasses.replace(grid, runs=runs, planned_runs=len(grid.runs))
    assert partial.is_partial
    part = partial.complete_part()
    assert {cell.global_batch for cell in part.cells} == {2, 4, 8}
    assert len(part.cells) == 12
    assert part.seeds == [0]
    assert grid.complete_part() == grid
    assert dataclasses.replace(grid, runs=[]).complete_part().runs == []
