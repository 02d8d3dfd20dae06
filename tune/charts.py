"""Charts of a search and of a ladder.

What is drawn as a line over a search's points is the searcher's own prediction, so that the pictures show what it
believed, not a fit made afterwards.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from infra.units import GB
from train.intervals import Estimate
from tune.space import Candidate, Combination
from tune.strategy.curves import Curves
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.ranking import UNFIT, rank
from tune.trial.row import Curve, TrialRow, feasible


def draw(rows: Sequence[TrialRow], memory: MemorySearcher) -> dict[str, Figure]:
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


def _figure(title: str, x: str, y: str = "") -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def speeds(title: str, found: Sequence[tuple[str, Estimate, int]], reached: Sequence[float] = ()) -> Figure:
    """Names, speeds with their 95% intervals and peak memory in bytes, the first at the top.

    With the tokens/s ``reached`` by each of them, a waterfall beside it has what it adds to those before it.
    """
    figure = Figure(figsize=(15 if reached else 8, 1.5 + 0.4 * max(len(found), 6)), layout="constrained")
    axes, *beside = figure.subplots(1, 2 if reached else 1, sharey=True, squeeze=False)[0]
    known = [speed for _, speed, _ in found]
    axes.errorbar([speed.middle for speed in known], range(len(known)), xerr=_reach(known), fmt="o", capsize=3)
    for place, (_, speed, memory) in enumerate(found):
        axes.annotate(f"  {memory / GB:.2f} GB", (speed.high, place), va="center", fontsize="small")
    axes.set_yticks(range(len(found)), [name for name, *_ in found])
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_xlabel("tokens/s, with 95% intervals")
    axes.margins(x=0.2)
    for waterfall in beside:
        gains = [after - before for before, after in pairwise([0.0, *reached])]
        colours = ["C3" if gain < 0 else "C2" for gain in gains]
        bars = waterfall.barh(range(len(gains)), gains, left=[0.0, *reached[:-1]], color=colours)
        waterfall.bar_label(bars, [f"{gain:+,.0f}" for gain in gains], padding=4)
        waterfall.set_xlabel("tokens/s that each rung adds")
        waterfall.set_xlim(right=1.2 * max(reached))
    axes.invert_yaxis()
    return figure


def _reach(speeds: Sequence[Estimate]) -> list[list[float]]:
    """How far their intervals reach below and above."""
    return [[speed.middle - speed.low for speed in speeds], [speed.high - speed.middle for speed in speeds]]


MOST_PLACES = 20


def grouped(rungs: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Bars of each of the ``rungs``, the first at the top, by what they are of and by whose they are."""
    figure = Figure(figsize=(13, 0.6 + 0.85 * len(rungs)), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, bars) in zip(all_axes, panels.items(), strict=True):
        height = 0.8 / len(bars)
        for place, (whose, values) in enumerate(bars.items()):
            drawn = axes.barh([rung + place * height for rung in range(len(rungs))], values, height, label=whose)
            axes.bar_label(
                drawn, [f"{value:,.{1 if value < 100 else 0}f}" for value in values], padding=3, fontsize="small"
            )
        axes.set_title(title, loc="left", fontsize="medium")
        axes.set_yticks([rung + 0.4 - height / 2 for rung in range(len(rungs))], rungs)
        axes.margins(x=0.15)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=len(bars), fontsize="small")
    all_axes[0].invert_yaxis()
    return figure


def _leaderboard(rows: Sequence[TrialRow], memory: MemorySearcher) -> Figure:
    """The fastest candidates, and the control."""
    ranked = rank(rows)
    best = [(memory.space.label(entry.candidate), entry.speed, entry.memory) for entry in ranked[:MOST_PLACES]]
    figure = speeds("Leaderboard", best)
    for entry in ranked:
        if entry.candidate == memory.space.control:
            figure.axes[0].axvline(entry.speed.middle, color="grey", linestyle="--", label="control")
            figure.axes[0].legend(fontsize="small")
    return figure


def losses(title: str, runs: Sequence[tuple[str, TrialRow]], controls: Sequence[TrialRow]) -> Figure:
    """Training loss against tokens seen, one line per run, and the band of the ``controls``."""
    figure, axes = _figure(title, "training tokens", "training loss, nats per token")
    for number, (name, row) in enumerate(runs):
        style = ("-", "--", ":")[number // 10 % 3]  # there are ten colours
        axes.plot(*zip(*row.curve, strict=True), style, linewidth=1, label=name)
    seen, low, high = zip(*band([row.curve for row in controls]), strict=True)
    axes.fill_between(seen, low, high, color="grey", alpha=0.4, linewidth=0, label="control, all runs")
    axes.legend(fontsize="x-small")
    return figure


def band(controls: Sequence[Curve]) -> list[tuple[int, float, float]]:
    """Tokens seen, and the lowest and the highest loss of the ``controls`` there, as far as all of them ran."""
    return [
        (points[0][0], min(loss for _, loss in points), max(loss for _, loss in points))
        for points in zip(*controls, strict=False)
    ]


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
        points = [(row.candidate.micro_batch, row.speed) for row in feasible(rows) if row.candidate.knobs == knobs]
        sizes, found = [size for size, _ in points], [speed for _, speed in points if speed]
        name = curves.space.knobs_label(knobs) or "control's knobs"
        axes.errorbar(
            sizes, [speed.middle for speed in found], yerr=_reach(found), fmt="o", color=colour, capsize=3, label=name
        )
    largest = max((size for knobs in tried for size in curves.feasible_sizes(knobs)), default=curves.space.sizes[-1])
    if beyond := [size for size in curves.space.sizes if size > largest]:
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
    speeds = ((row.outcome == "ok" and row.stage != "confirm" and row.tokens_per_second) or 0.0 for row in rows)
    axes.step(list(accumulate(row.seconds for row in rows)), list(accumulate(speeds, max)), where="post")
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
    figure, axes = _figure("One knob at a time, each at its best size", "change of speed against the control's knobs")
    names = [memory.space.knobs_label(knobs) for knobs in near]
    axes.barh(names, [100 * (best[knobs] / best[control] - 1) for knobs in near])
    axes.xaxis.set_major_formatter("{x:+.0f}%")
    return figure
