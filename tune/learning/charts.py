"""The chart of a search for the lowest loss, ``loss-by-time.png``: loss by training time of all candidates."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from infra import charts
from infra.cli.units import format_duration
from tune.learning.results import CandidateResult, LearningResults
from tune.space import Candidate

TICKS = [base * unit for unit in (1, 60, 3600) for base in (1, 2, 5, 10, 30)] + [86400.0 * n for n in (1, 2, 5, 10, 30)]
"""Times in seconds that may have a tick."""
FRONT_POINTS = 200
"""Number of points of the front."""
INTERVAL_GAP = 1.05
"""Ratio of times between the intervals of two finalists at the full time, which would hide each other."""


@charts.styled
def draw_loss_by_time(
    results: LearningResults, label: Callable[[Candidate], str], title: str, conditions: str
) -> Figure | None:
    """Draw the losses of all candidates by training time, and the front; None without any loss.

    ``label`` formats the settings of a candidate. The ``conditions`` are the line below the ``title``.
    """
    if not results.candidates:
        return None
    figure, (axes,) = charts.new_figure(title, conditions, height=4.4)
    axes.set(xscale="log", xlabel="training time of the final run", ylabel="held-out loss (nats/token)")
    control = results.control
    shown = results.compared
    thin: dict[str, Any] = {"color": charts.GRAY, "alpha": 0.45, "linewidth": 0.8, "markersize": 3}
    for number, result in enumerate(each for each in results.candidates if each not in shown):
        name = None if number else "other candidates"
        axes.plot(*zip(*result.mean_curve, strict=True), ".-", **thin, label=name)
    owners = _draw_front(axes, results)
    colors = iter((charts.BLUE, charts.ORANGE, charts.GREEN, charts.PURPLE, charts.SKY))
    for number, result in enumerate(shown):
        is_winner = result is results.winner
        color = charts.VERMILION if is_winner else charts.BLACK if result is control else next(colors, charts.SKY)
        notes = ["winner"] * is_winner + ["tie"] * results.is_tied(result) + ["control"] * (result is control)
        text = label(result.candidate) + (f" ({', '.join(notes)})" if notes else "")
        _draw_candidate(axes, result, results.train_time, color, text, number)
    if results.target_loss is not None:
        charts.mark_limit(axes, results.target_loss, vertical=False, text=f"target {results.target_loss:g}")
    axes.axvline(results.train_time, color=charts.GRAY, linestyle=":", linewidth=1, zorder=0)
    _format_axes(axes, results, shown)
    charts.add_legend(axes)
    others = [(point, label(owner.candidate)) for owner, point in owners if owner not in shown]
    charts.label_points(axes, [point for point, _ in others], [text for _, text in others])
    return figure


def _draw_candidate(axes: Axes, result: CandidateResult, train_time: float, color: str, text: str, number: int) -> None:
    """Draw the rungs of the finalist with this ``number``, its law beyond them, and its interval at the full time.

    The first one is drawn above the others.
    """
    marker, zorder = charts.MARKERS[number % 6], 10 - number
    times, losses = zip(*result.mean_curve, strict=True)
    axes.plot(times, losses, marker=marker, color=color, markersize=4, linewidth=1.4, label=text, zorder=zorder)
    loss = result.loss(train_time)
    if loss is None:
        return
    later = np.geomspace(times[-1], train_time, 20) if train_time > times[-1] else []
    predicted = [estimate.middle for time in later if (estimate := result.law.loss(float(time)))]
    axes.plot(later, predicted, "--", color=color, linewidth=1.2, zorder=zorder)
    axes.errorbar(
        [train_time * INTERVAL_GAP**number], [loss.middle], yerr=[[loss.middle - loss.low], [loss.high - loss.middle]],
        fmt=marker, color=color, markersize=4, zorder=zorder,
    )  # fmt: skip


def _draw_front(axes: Axes, results: LearningResults) -> list[tuple[CandidateResult, tuple[float, float]]]:
    """Draw the lowest loss of all candidates at each time, as a wide band below the lines.

    Returns: (candidate with the lowest loss for some time, the first point at which it has it).
    """
    first = min(curve[0][0] for result in results.candidates for curve in result.curves.values())
    points: list[tuple[float, float]] = []
    owners: list[tuple[CandidateResult, tuple[float, float]]] = []
    for time in map(float, np.geomspace(first, max(first, results.train_time), FRONT_POINTS)):
        best = results.best_at(time)
        loss = best and best.loss(time)
        if best and loss:
            points.append((time, loss.middle))
            if not owners or owners[-1][0] is not best:
                owners.append((best, points[-1]))
    if points:
        axes.plot(
            *zip(*points, strict=True), color=charts.SKY, alpha=0.4, linewidth=6, solid_capstyle="butt",
            label="lowest loss by time", zorder=1,
        )  # fmt: skip
    return owners


def _format_axes(axes: Axes, results: LearningResults, shown: Sequence[CandidateResult]) -> None:
    """Label times as durations, and leave out the losses above those that matter."""
    low, high = axes.get_xlim()
    ticks = [tick for tick in TICKS if low <= tick <= high]
    while len(ticks) > 7:
        ticks = ticks[::-2][::-1]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_duration(seconds)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(7))
    axes.yaxis.set_major_formatter("{x:.10g}")
    lows = [loss.low for result in shown if (loss := result.loss(results.train_time))]
    firsts = [loss for result in shown for _, loss in result.mean_curve]
    bottom = min([*lows, *firsts])
    top = max(firsts)
    if math.isfinite(bottom) and top > bottom:
        axes.set_ylim(bottom - 0.05 * (top - bottom), top + 0.1 * (top - bottom))
