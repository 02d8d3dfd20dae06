"""The search in pictures: leaderboard, memory and speed by micro-batch, their Pareto front, progress, and single knobs.

Everything drawn as a line is the searcher's own prediction, so that the pictures show what it believed, not a fit made
afterwards.
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from infra.units import GB
from tune.space import Candidate, Combination
from tune.strategy.curves import Curves
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.ranking import UNFIT, rank
from tune.trial.row import TrialRow, feasible


def draw(rows: Sequence[TrialRow], memory: MemorySearcher) -> dict[str, Figure]:
    """All charts of a search, by name."""
    curves = memory.curves([row for row in rows if row.stage != "confirm"])
    tried = [k for k in memory.space.combinations if any(row.candidate.knobs == k for row in rows)]
    charts = {
        "leaderboard": _leaderboard(rows, memory),
        "memory_by_micro_batch": _memory(rows, curves, tried),
        "speed_by_micro_batch": _speed(rows, curves, tried),
        "pareto": _pareto(rows, memory),
        "progress": _progress(rows),
    }
    deltas = _deltas(rows, memory)
    return charts | ({"knobs": deltas} if deltas else {})


def _figure(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


MOST_PLACES = 20


def _leaderboard(rows: Sequence[TrialRow], memory: MemorySearcher) -> Figure:
    """The fastest candidates with the 95% intervals of their speeds, the winner at the top, and the control."""
    figure, axes = _figure("Leaderboard", "tokens/s, with 95% intervals", "")
    ranked = rank(rows)
    shown = ranked[:MOST_PLACES]
    speeds = [entry.speed.middle for entry in shown]
    below = [entry.speed.middle - entry.speed.low for entry in shown]
    above = [entry.speed.high - entry.speed.middle for entry in shown]
    axes.errorbar(speeds, range(len(shown)), xerr=[below, above], fmt="o", capsize=3)
    axes.set_yticks(range(len(shown)), [memory.space.label(entry.candidate) for entry in shown])
    axes.invert_yaxis()
    for entry in ranked:
        if entry.candidate == memory.space.control:
            axes.axvline(entry.speed.middle, color="grey", linestyle="--", label="control")
            axes.legend(fontsize="small")
    return figure


def _memory(rows: Sequence[TrialRow], curves: Curves, tried: Sequence[Combination]) -> Figure:
    """Predicted line, measured points, the limit."""
    figure, axes = _figure("Peak memory of the process", "micro-batch (sequences)", "GB (10^9 bytes)")
    largest = max((row.candidate.micro_batch for row in rows), default=1)
    for number, knobs in enumerate(tried):
        colour = f"C{number % 10}"
        sizes = [size for size in curves.space.sizes_of(knobs) if size <= 1.5 * largest]
        predicted = [curves.memory(Candidate(size, knobs)) / GB for size in sizes]
        axes.plot(sizes, predicted, color=colour, alpha=0.6, linewidth=1)
        points = [row for row in rows if row.candidate.knobs == knobs and row.memory]
        axes.scatter(
            [row.candidate.micro_batch for row in points], [(row.memory or 0) / GB for row in points],
            color=colour, marker="o", label=curves.space.knobs_label(knobs) or "control's knobs",
        )  # fmt: skip
    unfit = [row for row in rows if row.outcome in UNFIT]
    axes.scatter([r.candidate.micro_batch for r in unfit], [curves.limit / GB] * len(unfit), color="red", marker="x")
    axes.axhline(curves.limit / GB, color="red", linestyle="--", label="limit (crosses: did not fit)")
    axes.legend(fontsize="small")
    return figure


def _speed(rows: Sequence[TrialRow], curves: Curves, tried: Sequence[Combination]) -> Figure:
    """Measured speeds with their intervals, the fitted curve, and the sizes that do not fit."""
    figure, axes = _figure("Speed", "micro-batch (sequences)", "tokens/s")
    axes.set_xscale("log", base=2)
    for number, knobs in enumerate(tried):
        colour = f"C{number % 10}"
        expected = [(size, curves.speed(Candidate(size, knobs))) for size in curves.space.sizes_of(knobs)]
        known = [(size, speed) for size, speed in expected if speed]
        axes.plot([size for size, _ in known], [speed for _, speed in known], color=colour, alpha=0.6, linewidth=1)
        points = [row for row in feasible(rows) if row.candidate.knobs == knobs]
        speeds = [row.tokens_per_second or 0.0 for row in points]
        below = [max(0.0, (row.tokens_per_second or 0.0) - (row.low or 0.0)) for row in points]
        above = [max(0.0, (row.high or 0.0) - (row.tokens_per_second or 0.0)) for row in points]
        sizes = [row.candidate.micro_batch for row in points]
        name = curves.space.knobs_label(knobs) or "control's knobs"
        axes.errorbar(sizes, speeds, yerr=[below, above], fmt="o", color=colour, capsize=3, label=name)
    ceilings = [curves.feasible_sizes(knobs)[-1] for knobs in tried if curves.feasible_sizes(knobs)]
    beyond = [size for size in curves.space.sizes if ceilings and size > max(ceilings)]
    if beyond:
        axes.axvspan(beyond[0], beyond[-1], color="red", alpha=0.08, label="does not fit")
    axes.legend(fontsize="small")
    return figure


def _pareto(rows: Sequence[TrialRow], memory: MemorySearcher) -> Figure:
    """Speed against memory, and the candidates that nothing beats in both."""
    figure, axes = _figure("Speed against memory", "GB (10^9 bytes)", "tokens/s")
    ranked = sorted(rank(rows), key=lambda s: s.memory)
    axes.scatter([s.memory / GB for s in ranked], [s.speed.middle for s in ranked])
    front, best = [], 0.0
    for entry in ranked:
        place = (entry.memory / GB, entry.speed.middle)
        axes.annotate(memory.space.label(entry.candidate), place, fontsize="x-small", clip_on=True)
        if entry.speed.middle > best:
            best = entry.speed.middle
            front.append(entry)
    axes.step([s.memory / GB for s in front], [s.speed.middle for s in front], where="post", label="Pareto front")
    axes.axvline(memory.limit / GB, color="red", linestyle="--", label="limit")
    axes.legend(fontsize="small")
    return figure


def _progress(rows: Sequence[TrialRow]) -> Figure:
    """The best so far against the seconds spent."""
    figure, axes = _figure("Best so far", "device seconds spent, start-up included", "tokens/s")
    spent, best, points = 0.0, 0.0, []
    for row in rows:
        spent += row.seconds
        if row.outcome == "ok" and row.stage != "confirm":
            best = max(best, row.tokens_per_second or 0.0)
        points.append((spent, best))
    axes.step([x for x, _ in points], [y for _, y in points], where="post")
    return figure


def _deltas(rows: Sequence[TrialRow], memory: MemorySearcher) -> Figure | None:
    """What each knob does alone: the best of the combinations one knob away, against the control's best."""
    best: dict[Combination, float] = {}
    for row in feasible(rows):
        best[row.candidate.knobs] = max(best.get(row.candidate.knobs, 0.0), row.tokens_per_second or 0.0)
    control = memory.space.control.knobs
    near = [knobs for knobs in memory.space.neighbours(control) if knobs in best]
    if control not in best or not near:
        return None
    figure, axes = _figure(
        "One knob at a time, each at its best size", "change of speed against the control's knobs", ""
    )
    names = [memory.space.knobs_label(knobs) for knobs in near]
    axes.barh(names, [100 * (best[knobs] / best[control] - 1) for knobs in near])
    axes.xaxis.set_major_formatter("{x:+.0f}%")
    return figure
