"""The charts of a search show its rows, the limit, and what the searcher believed."""

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from trial_rows import changed

from infra.device.hardware import A100
from train.config import TrainConfig
from train.model_config import PRESETS
from train.resolved import resolve
from tune.reporting.charts import draw
from tune.space import make_space
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.ranking import candidate_speeds, rank
from tune.trial.row import Stage, TrialOutcome, TrialRow, rows_with_speed

BASE = TrainConfig.of(model=PRESETS["gpt2-124m"], global_batch=480, micro_batch=16, compile="whole", attention="sdpa")


CONDITIONS = "NVIDIA A100 · memory limit 40 GB · 2026-11-28 07:00"


@pytest.fixture(scope="module", params=[(("checkpointing=none,selective,full",), ()), ((), (1, 2, 4))])
def search(
    benchmark: Callable[[str], ModuleType], request: pytest.FixtureRequest
) -> tuple[list[TrialRow], MemorySearcher]:
    """A finished search of one knob, or of two axes, on a simulated GPU."""
    compare = benchmark("compare")
    machine = compare.Simulated(make_space(resolve(BASE, A100), *request.param), 7)
    rows = compare.drive(compare.ours(machine), machine, race=True)
    return rows, MemorySearcher(machine.space, machine.prior, machine.limit)


@pytest.fixture(scope="module")
def charts(search: tuple[list[TrialRow], MemorySearcher]) -> dict[str, Figure]:
    return draw(*search, CONDITIONS)


def points(figure: Figure) -> set[tuple[float, float]]:
    """All points that are drawn one by one, rounded."""
    drawn = [np.asarray(dots.get_offsets(), dtype=float) for dots in figure.axes[0].collections]
    return {(round(x, 4), round(y, 4)) for places in drawn for x, y in places.tolist()}


def path(line: Line2D) -> list[tuple[float, float]]:
    """The corners of a drawn line."""
    return [(x, y) for x, y in np.asarray(line.get_xydata(), dtype=float).tolist()]


def labels(figure: Figure) -> set[str]:
    return set(figure.axes[0].get_legend_handles_labels()[1])


def test_the_leaderboard_begins_with_the_winner(
    search: tuple[list[TrialRow], MemorySearcher], charts: dict[str, Figure]
) -> None:
    rows, memory = search
    axes = charts["leaderboard"].axes[0]
    ranked = rank(rows)
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        memory.space.short_label(entry.candidate) for entry in ranked[:20]
    ]
    speeds = [x for line in axes.lines if line.get_marker() in ("*", "o") for x, _ in path(line)]
    assert speeds == [entry.speed.middle for entry in ranked[:20]]
    stars = [path(line) for line in axes.lines if line.get_marker() == "*"]
    assert stars == [[(ranked[0].speed.middle, 0.0)]], "the winner is marked"
    intervals = [line.get_segments()[0] for line in axes.collections if isinstance(line, LineCollection)]
    ends = [tuple(np.asarray(interval)[:, 0]) for interval in intervals]
    assert ends == [pytest.approx((entry.speed.low, entry.speed.high)) for entry in ranked[:20]]
    assert axes.yaxis_inverted()
    notes = {text.get_text().partition(" · ")[2] for text in axes.texts}
    assert {"winner", "control"} <= {note for notes_of_row in notes for note in notes_of_row.split(", ")}


def test_memory_and_limit(search: tuple[list[TrialRow], MemorySearcher], charts: dict[str, Figure]) -> None:
    rows, memory = search
    figure = charts["memory_by_micro_batch"]
    expected = {(row.candidate.micro_batch, round((row.memory or 0) / 1e9, 4)) for row in rows if row.memory}
    assert expected <= points(figure)
    assert {"control settings", "winner"} <= labels(figure)
    assert f"limit {round(memory.limit / 1e9, 1):g} GB" in {text.get_text() for text in figure.axes[0].texts}
    (limit,) = [line for line in figure.axes[0].lines if line.get_linestyle() == "--"]
    assert {y for _, y in path(limit)} == {memory.limit / 1e9}


def test_the_predicted_line_runs_through_what_was_measured(
    search: tuple[list[TrialRow], MemorySearcher], charts: dict[str, Figure]
) -> None:
    rows, memory = search
    own = [row for row in rows_with_speed(rows) if row.candidate.knobs == memory.space.control.knobs and row.memory]
    predicted = dict(path(charts["memory_by_micro_batch"].axes[0].lines[0]))
    for row in own:
        assert predicted[row.candidate.micro_batch] == pytest.approx((row.memory or 0) / 1e9, rel=0.05)


def test_speeds_stand_with_their_intervals_and_the_zone_that_does_not_fit(
    search: tuple[list[TrialRow], MemorySearcher], charts: dict[str, Figure]
) -> None:
    rows, _ = search
    figure = charts["speed_by_micro_batch"]
    heights = {round(y, 2) for line in figure.axes[0].lines for _, y in path(line)}
    assert {round(speed.middle, 2) for speed in candidate_speeds(rows).values()} <= heights
    assert "does not fit" in {text.get_text() for text in figure.axes[0].texts}


def test_nothing_left_of_the_front_is_faster(
    search: tuple[list[TrialRow], MemorySearcher], charts: dict[str, Figure]
) -> None:
    figure = charts["pareto"]
    (front,) = [line for line in figure.axes[0].lines if line.get_label() == "Pareto front"]
    corners = path(front)
    assert corners
    for x, y in points(figure):
        assert any(memory <= x + 1e-3 and speed >= y - 1e-3 for memory, speed in corners)


def test_the_best_so_far_never_falls(search: tuple[list[TrialRow], MemorySearcher], charts: dict[str, Figure]) -> None:
    rows, _ = search
    line = charts["progress"].axes[0].lines[0]
    best = [y for _, y in path(line)]
    assert best == sorted(best)
    assert best[-1] == max(row.tokens_per_second or 0 for row in rows if row.outcome == "ok" and row.stage != "confirm")
    assert path(line)[-1][0] == pytest.approx(sum(row.seconds for row in rows))


@pytest.mark.parametrize(
    ("stage", "outcome"), [("confirm", "ok"), ("probe", "over_limit"), ("refine", "thrash"), ("probe", "pruned")]
)
def test_neither_a_confirmation_nor_a_trial_that_cannot_win_counts_as_progress(
    search: tuple[list[TrialRow], MemorySearcher], stage: Stage, outcome: TrialOutcome
) -> None:
    rows, memory = search
    lucky = changed(rows[-1], stage=stage, outcome=outcome, tokens_per_second=1e9, low=1e9, high=1e9)
    lines = draw([*rows, lucky], memory, CONDITIONS)["progress"].axes[0].lines
    assert max(y for line in lines for _, y in path(line)) < 1e9


def test_one_knob_at_a_time(search: tuple[list[TrialRow], MemorySearcher], charts: dict[str, Figure]) -> None:
    _, memory = search
    axes = charts["knobs"].axes[0]
    names = {text.get_text() for text in axes.get_yticklabels()}
    assert names <= {memory.space.knobs_label(knobs) for knobs in memory.space.combinations}
    assert names
    widths = [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]
    assert len(widths) == len(names)
    expected = min(widths) > 1 if memory.space.is_accumulation_searched else min(widths) < -3
    assert expected, "in the simulation accumulating gains some percent of the speed, and checkpointing costs some"


def test_every_chart_says_what_it_shows_and_where(
    search: tuple[list[TrialRow], MemorySearcher], charts: dict[str, Figure]
) -> None:
    _, memory = search
    for name, figure in charts.items():
        assert memory.space.base.model.text in figure.get_suptitle(), name
        assert [inner.get_suptitle() for inner in figure.subfigs] == [CONDITIONS], name


def test_a_chart_with_two_candidates_is_lower_than_one_with_many(
    search: tuple[list[TrialRow], MemorySearcher], charts: dict[str, Figure]
) -> None:
    rows, memory = search
    ranked = {entry.candidate for entry in rank(rows)[:2]}
    pair = draw([row for row in rows if row.candidate in ranked], memory, CONDITIONS)["leaderboard"]
    assert pair.get_figheight() < 0.9 * charts["leaderboard"].get_figheight()
