"""Charts of a search, and the chart of speeds that a ladder also has.

Lines over a search's points are the searcher's predictions, which show why it chose its trials. They are not fitted
afterwards.
"""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from infra import charts
from infra.cli.units import GB
from train.intervals import Difference, Estimate
from tune.space import Candidate, KnobValues
from tune.strategy.curves import FittedCurves
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.ranking import DOES_NOT_FIT, candidate_speeds, rank
from tune.trial.row import TrialRow

MAX_LEADERBOARD_ROWS = 20
"""Maximum number of candidates in the chart of the leaderboard."""
NAME_CHARACTERS = 30
"""Length at which the name of a row is wrapped."""


class SpeedRow(NamedTuple):
    """Row of a chart of speeds."""

    name: str
    speed: Estimate
    """Speed in tokens/s."""
    memory: int
    """Peak memory of the process in bytes."""
    note: str = ""
    """Text behind the memory, such as ``winner``."""
    is_winner: bool = False


@charts.styled
def draw(rows: Sequence[TrialRow], memory: MemorySearcher, conditions: str) -> dict[str, Figure]:
    """Draw the charts of a search that its rows allow, by file name without its suffix.

    The ``conditions`` are the line below the titles, as :func:`infra.charts.describe_conditions` formats them.
    """
    curves = memory.curves([row for row in rows if row.stage != "confirm"])
    figures = {
        "memory_by_micro_batch": _memory(rows, curves, conditions),
        "speed_by_micro_batch": _speed(rows, curves, conditions),
    }
    if rank(rows):
        figures |= {
            "leaderboard": _leaderboard(rows, memory, conditions),
            "pareto": _pareto(rows, memory, conditions),
            "progress": _progress(rows, memory, conditions),
        }
    knob_effects = _knob_effects(rows, memory, conditions)
    return figures | ({"knobs": knob_effects} if knob_effects else {})


def draw_speeds(axes: Axes, rows: Sequence[SpeedRow], heading: str) -> None:
    """Draw the speeds of ``rows`` with 95% intervals and, as text, their memory, the first row at the top.

    The ``heading`` is above the names of the rows.
    """
    for position, row in enumerate(rows):
        color, marker, size = (charts.VERMILION, "*", 12) if row.is_winner else (charts.BLUE, "o", 6)
        error_bars = error_lengths([row.speed])
        axes.errorbar([row.speed.middle], [position], xerr=error_bars, fmt=marker, color=color, markersize=size)
        axes.annotate(
            " · ".join(filter(None, (f"{row.memory / GB:.2f} GB", row.note))), (row.speed.high, position), (6, 0),
            textcoords="offset points", va="center", fontsize="small", color=charts.GRAY,
        )  # fmt: skip
    name_rows(axes, [row.name for row in rows], heading)
    axes.set_xlabel("tokens/s (95% CI), with peak memory")
    charts.format_thousands(axes.xaxis)
    low, high = min(row.speed.low for row in rows), max(row.speed.high for row in rows)
    margin = (high - low) or 0.1 * high
    axes.set_xlim(low - 0.08 * margin, high + (0.3 + 0.02 * max(len(row.note) for row in rows)) * margin)


def name_rows(axes: Axes, names: Sequence[str], heading: str) -> None:
    """Name the rows of ``axes``, the first one at the top, with a ``heading`` above the names."""
    axes.set_yticks(range(len(names)), [textwrap.fill(name, NAME_CHARACTERS) for name in names], color=charts.BLACK)
    axes.set_ylim(len(names) - 0.4, -0.6)
    # Beside the names it would be longer than a chart with two rows is high.
    axes.annotate(
        heading, (0, 1), (-4, 3), xycoords="axes fraction", textcoords="offset points", ha="right", va="bottom",
        fontsize="small", color=charts.GRAY,
    )  # fmt: skip


def height_of(names: Sequence[str]) -> float:
    """Return the height in inches of a chart with a row for each of the ``names``."""
    lines = max((len(textwrap.wrap(name, NAME_CHARACTERS)) for name in names), default=1)
    return 1.6 + (0.18 + 0.17 * lines) * max(2, len(names))


def error_lengths(speeds: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of the confidence intervals below and above their middles, as matplotlib takes them."""
    return [[speed.middle - speed.low for speed in speeds], [speed.high - speed.middle for speed in speeds]]


def _leaderboard(rows: Sequence[TrialRow], memory: MemorySearcher, conditions: str) -> Figure:
    space, ranked = memory.space, rank(rows)[:MAX_LEADERBOARD_ROWS]
    speed_rows = []
    for entry in ranked:
        is_winner, is_control = entry is ranked[0], entry.candidate == space.control
        note = ", ".join(["winner"] * is_winner + ["tie"] * (entry.tied and not is_winner) + ["control"] * is_control)
        speed_rows.append(SpeedRow(space.short_label(entry.candidate), entry.speed, entry.memory, note, is_winner))
    title = f"Leaderboard of {space.base.model.text}, {space.batch_label}"
    figure, (axes,) = charts.new_figure(title, conditions, height=height_of([row.name for row in speed_rows]))
    draw_speeds(axes, speed_rows, "micro-batch x accumulation")
    return figure


def _combinations(rows: Sequence[TrialRow], curves: FittedCurves) -> Iterator[tuple[KnobValues, str, str, str]]:
    """Yields: (combination of knobs in ``rows``, its label, color, marker)."""
    tried = [knobs for knobs in curves.space.combinations if any(row.candidate.knobs == knobs for row in rows)]
    for number, knobs in enumerate(tried):
        label = curves.space.knobs_label(knobs) or "control settings"
        yield knobs, label, charts.SERIES_COLORS[number % 6], charts.MARKERS[number % 6]


def _mark_winner(axes: Axes, point: tuple[float, float]) -> None:
    axes.plot(*point, "*", color=charts.VERMILION, markersize=15, zorder=5, label="winner")


def _memory(rows: Sequence[TrialRow], curves: FittedCurves, conditions: str) -> Figure:
    title = f"Peak memory of {curves.space.base.model.text} by micro-batch"
    figure, (axes,) = charts.new_figure(title, conditions)
    axes.set(xlabel="micro-batch (sequences)", ylabel="peak memory of the process (GB)")
    largest = max((row.candidate.micro_batch for row in rows), default=1)
    limit = curves.limit / GB
    for knobs, label, color, marker in _combinations(rows, curves):
        sizes = [size for size in curves.space.micro_batches_for(knobs) if size <= 1.5 * largest]
        predicted = [curves.memory(Candidate(size, knobs)) / GB for size in sizes]
        axes.plot(sizes, predicted, color=color, alpha=0.7, linewidth=1)
        points = [row for row in rows if row.candidate.knobs == knobs and row.memory]
        axes.scatter(
            [row.candidate.micro_batch for row in points], [(row.memory or 0) / GB for row in points],
            color=color, marker=marker, label=label, zorder=3,
        )  # fmt: skip
    if unfit := [row.candidate.micro_batch for row in rows if row.outcome in DOES_NOT_FIT]:
        axes.scatter(unfit, [limit] * len(unfit), color=charts.VERMILION, marker="x", zorder=4, label="did not fit")
    for winner in rank(rows)[:1]:
        _mark_winner(axes, (winner.candidate.micro_batch, winner.memory / GB))
    axes.set_ylim(0, 1.2 * max([limit, *((row.memory or 0) / GB for row in rows)]))
    axes.set_xlim(0)
    charts.mark_limit(axes, limit, vertical=False)
    charts.add_legend(axes)
    return figure


def _speed(rows: Sequence[TrialRow], curves: FittedCurves, conditions: str) -> Figure:
    """Draw the measured speeds with their intervals, the fitted curves, and the micro-batches that do not fit."""
    title = f"Speed of {curves.space.base.model.text} by micro-batch"
    figure, (axes,) = charts.new_figure(title, conditions)
    axes.set(xlabel="micro-batch (sequences)", ylabel="tokens/s (95% CI)", xscale="log")
    combinations, measured = [*_combinations(rows, curves)], candidate_speeds(rows)
    for knobs, label, color, marker in combinations:
        predictions = [(size, curves.speed(Candidate(size, knobs))) for size in curves.space.micro_batches_for(knobs)]
        line = [(size, speed) for size, speed in predictions if speed]
        axes.plot([size for size, _ in line], [speed for _, speed in line], color=color, alpha=0.7, linewidth=1)
        points = {point.micro_batch: speed for point, speed in measured.items() if point.knobs == knobs}
        sizes, speeds = [*points], [*points.values()]
        middles = [speed.middle for speed in speeds]
        axes.errorbar(sizes, middles, yerr=error_lengths(speeds), fmt=marker, color=color, markersize=5, label=label)
    for winner in rank(rows)[:1]:
        _mark_winner(axes, (winner.candidate.micro_batch, winner.speed.middle))
    fitting = [size for knobs, *_ in combinations for size in curves.feasible_sizes(knobs)]
    largest = max(fitting, default=curves.space.micro_batches[-1])
    if unfit_sizes := [size for size in curves.space.micro_batches if size > largest]:
        axes.axvspan(unfit_sizes[0], 2 * unfit_sizes[0], color=charts.VERMILION, alpha=0.08, linewidth=0)
        axes.text(
            1.05 * unfit_sizes[0], 0.05, "does not fit", transform=axes.get_xaxis_transform(), rotation=90,
            color=charts.VERMILION, fontsize="small", va="bottom",
        )  # fmt: skip
        axes.set_xlim(right=2 * unfit_sizes[0])
    charts.format_thousands(axes.xaxis, axes.yaxis)
    axes.xaxis.set_major_locator(LogLocator(2))
    axes.xaxis.set_minor_locator(NullLocator())
    charts.add_legend(axes)
    return figure


def _pareto(rows: Sequence[TrialRow], memory: MemorySearcher, conditions: str) -> Figure:
    """Draw speed by memory, with the Pareto front: the candidates that are faster than all with less memory."""
    space = memory.space
    figure, (axes,) = charts.new_figure(f"Speed of {space.base.model.text} by memory", conditions)
    axes.set(xlabel="peak memory of the process (GB)", ylabel="tokens/s")
    ranked = rank(rows)
    points = {entry.candidate: (entry.memory / GB, entry.speed.middle) for entry in ranked}
    front, best = [], 0.0
    for entry in sorted(ranked, key=lambda entry: (entry.memory, -entry.speed.middle)):
        if entry.speed.middle > best:
            best = entry.speed.middle
            front.append(entry.candidate)
    axes.scatter(*zip(*points.values(), strict=True), color=charts.BLUE, zorder=3)
    axes.step(*zip(*map(points.__getitem__, front), strict=True), where="post", color=charts.SKY, label="Pareto front")
    _mark_winner(axes, points[ranked[0].candidate])
    charts.mark_limit(axes, memory.limit / GB, vertical=True)
    charts.format_thousands(axes.xaxis, axes.yaxis)
    axes.margins(x=0.1, y=0.12)
    charts.add_legend(axes)
    important = dict.fromkeys([ranked[0].candidate, *reversed(front), *points])
    charts.label_points(axes, [points[each] for each in important], [space.short_label(each) for each in important])
    return figure


def _progress(rows: Sequence[TrialRow], memory: MemorySearcher, conditions: str) -> Figure:
    """Draw the best speed so far by the device time of the trials."""
    figure, (axes,) = charts.new_figure(
        f"Best speed of {memory.space.base.model.text} during the search", conditions, height=3.2
    )
    axes.set(xlabel="time of the trials, with their start (s)", ylabel="tokens/s")
    times = [*accumulate(row.seconds for row in rows)]
    speeds = [(row.outcome == "ok" and row.stage != "confirm" and row.tokens_per_second) or 0.0 for row in rows]
    best = [*accumulate(speeds, max)]
    axes.step(times, best, where="post", color=charts.BLUE)
    charts.format_thousands(axes.xaxis, axes.yaxis)
    axes.margins(x=0.08, y=0.15)
    gains = [number for number, speed in enumerate(speeds) if speed and speed == best[number]]
    axes.plot([times[number] for number in gains], [best[number] for number in gains], "o", color=charts.BLUE)
    charts.label_points(
        axes, [(times[number], best[number]) for number in reversed(gains)],
        [memory.space.short_label(rows[number].candidate) for number in reversed(gains)],
    )  # fmt: skip
    return figure


def _knob_effects(rows: Sequence[TrialRow], memory: MemorySearcher, conditions: str) -> Figure | None:
    """Draw the effect of each knob alone: the best speed of each neighbor of the control, relative to the control."""
    best: dict[KnobValues, Estimate] = {}
    for candidate, speed in candidate_speeds(rows).items():
        best[candidate.knobs] = max(best.get(candidate.knobs, speed), speed, key=lambda speed: speed.middle)
    control = memory.space.control.knobs
    neighbors = [knobs for knobs in memory.space.neighbors(control) if knobs in best]
    if control not in best or not neighbors:
        return None
    title = f"One knob of {memory.space.base.model.text} changed, at its fastest micro-batch"
    differences = [Difference.between(best[knobs], best[control]) for knobs in neighbors]
    changes = [100 * (difference.ratio - 1) for difference in differences]
    texts = [
        f"{change:+.1f}%" if difference.is_significant else f"({change:+.1f}%)"
        for change, difference in zip(changes, differences, strict=True)
    ]
    colors = [charts.BLUE if change >= 0 else charts.ORANGE for change in changes]
    names = [memory.space.knobs_label(knobs) for knobs in neighbors]
    figure, (axes,) = charts.new_figure(title, conditions, height=height_of(names))
    bars = axes.barh(range(len(names)), changes, height=0.6, color=colors)
    axes.bar_label(bars, texts, padding=4, fontsize="small")
    axes.axvline(0, color=charts.GRAY, linewidth=0.8)
    axes.set_xlabel("speed vs control settings (in brackets: not significant)")
    axes.xaxis.set_major_formatter("{x:+g}%")
    axes.margins(x=0.18)
    name_rows(axes, names, "changed knob")
    return figure
