"""Charts of a search and of a ladder.

Lines over a search's points are the searcher's predictions, which show why it chose its trials. They are not fitted
afterwards.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from infra.cli.units import GB
from train.intervals import Estimate
from tune.space import Candidate, KnobValues
from tune.strategy.curves import FittedCurves
from tune.strategy.memory_aware import MemorySearcher
from tune.strategy.ranking import DOES_NOT_FIT, rank
from tune.trial.row import Curve, TrialRow, rows_with_speed


def draw(rows: Sequence[TrialRow], memory: MemorySearcher) -> dict[str, Figure]:
    """Draw all charts of a search, by file name without its suffix."""
    curves = memory.curves([row for row in rows if row.stage != "confirm"])
    combinations = [k for k in memory.space.combinations if any(row.candidate.knobs == k for row in rows)]
    charts = {
        "leaderboard": _leaderboard(rows, memory),
        "memory_by_micro_batch": _memory(rows, curves, combinations),
        "speed_by_micro_batch": _speed(rows, curves, combinations),
        "pareto": _pareto(rows, memory),
        "progress": _progress(rows),
    }
    knob_effects = _knob_effects(rows, memory)
    return charts | ({"knobs": knob_effects} if knob_effects else {})


def _figure(title: str, x: str, y: str = "") -> tuple[Figure, Axes]:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    return figure, axes


def draw_speeds(
    title: str, runs: Sequence[tuple[str, Estimate, int]], cumulative: Sequence[float] = (), label: str = "rung"
) -> Figure:
    """Draw the speeds of ``runs`` (name, tokens/s, peak memory in bytes) with 95% intervals, the first run at the top.

    With the ``cumulative`` tokens/s after each run, a second panel is a waterfall of the tokens/s that each run adds.
    """
    figure = Figure(figsize=(15 if cumulative else 8, 1.5 + 0.4 * max(len(runs), 6)), layout="constrained")
    axes, *waterfall_axes = figure.subplots(1, 2 if cumulative else 1, sharey=True, squeeze=False)[0]
    estimates = [speed for _, speed, _ in runs]
    middles = [speed.middle for speed in estimates]
    axes.errorbar(middles, range(len(runs)), xerr=_error_bars(estimates), fmt="o", capsize=3)
    for position, (_, speed, memory) in enumerate(runs):
        axes.annotate(f"  {memory / GB:.2f} GB", (speed.high, position), va="center", fontsize="small")
    axes.set_yticks(range(len(runs)), [name for name, *_ in runs])
    axes.set_title(title, loc="left", fontsize="medium")
    axes.set_ylabel(label)
    axes.set_xlabel("tokens/s (95% CI), with peak memory (GB)")
    axes.margins(x=0.2)
    for waterfall in waterfall_axes:
        gains = [speed - previous_speed for previous_speed, speed in pairwise([0.0, *cumulative])]
        colors = ["C3" if gain < 0 else "C2" for gain in gains]
        bars = waterfall.barh(range(len(gains)), gains, left=[0.0, *cumulative[:-1]], color=colors)
        waterfall.bar_label(bars, [f"{gain:+,.0f}" for gain in gains], padding=4)
        waterfall.set_xlabel("tokens/s added by each rung")
        waterfall.set_xlim(right=1.2 * max(cumulative))
    axes.invert_yaxis()
    return figure


def _error_bars(speeds: Sequence[Estimate]) -> list[list[float]]:
    """Return the lengths of the confidence intervals below and above their middles, as matplotlib takes them."""
    return [[speed.middle - speed.low for speed in speeds], [speed.high - speed.middle for speed in speeds]]


MAX_LEADERBOARD_ROWS = 20
"""Maximum number of candidates in the chart of the leaderboard."""


def grouped_bars(rungs: Sequence[str], panels: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Draw grouped bars for the ``rungs``, the first rung at the top, with a panel per quantity and a bar per source.

    ``panels`` has the values of the rungs by the title of the panel, which has the unit, and by the label of the bars.
    """
    figure = Figure(figsize=(13, 0.6 + 0.85 * len(rungs)), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, (quantity, bars) in zip(all_axes, panels.items(), strict=True):
        height = 0.8 / len(bars)
        for number, (source, values) in enumerate(bars.items()):
            group = axes.barh([rung + number * height for rung in range(len(rungs))], values, height, label=source)
            texts = [f"{value:,.{1 if value < 100 else 0}f}" for value in values]
            axes.bar_label(group, texts, padding=3, fontsize="small")
        axes.set_title(quantity, loc="left", fontsize="medium")
        axes.set_yticks([rung + 0.4 - height / 2 for rung in range(len(rungs))], rungs)
        axes.margins(x=0.15)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=len(bars), fontsize="small")
    all_axes[0].invert_yaxis()
    return figure


def _leaderboard(rows: Sequence[TrialRow], memory: MemorySearcher) -> Figure:
    ranked = rank(rows)
    best = [
        (memory.space.short_label(entry.candidate), entry.speed, entry.memory)
        for entry in ranked[:MAX_LEADERBOARD_ROWS]
    ]
    figure = draw_speeds("Leaderboard", best, label="candidate")
    for entry in ranked:
        if entry.candidate == memory.space.control:
            figure.axes[0].axvline(entry.speed.middle, color="grey", linestyle="--", label="control")
            figure.axes[0].legend(fontsize="small")
    return figure


def draw_losses(title: str, runs: Sequence[tuple[str, TrialRow]], controls: Sequence[TrialRow]) -> Figure:
    """Draw the training loss by training tokens, with a line per run and the range of the ``controls``."""
    figure, axes = _figure(title, "training tokens", "training loss (nats/token)")
    for number, (name, row) in enumerate(runs):
        style = ("-", "--", ":")[number // 10 % 3]  # The colors repeat after ten lines.
        axes.plot(*zip(*row.curve, strict=True), style, linewidth=1, label=name)
    tokens, low, high = zip(*band([row.curve for row in controls]), strict=True)
    axes.fill_between(tokens, low, high, color="grey", alpha=0.4, linewidth=0, label="control, range of all runs")
    axes.legend(fontsize="x-small")
    return figure


def band(controls: Sequence[Curve]) -> list[tuple[int, float, float]]:
    """Compute (training tokens, lowest loss, highest loss) of the ``controls``, up to the length of the shortest."""
    return [
        (points[0][0], min(loss for _, loss in points), max(loss for _, loss in points))
        for points in zip(*controls, strict=False)
    ]


def _memory(rows: Sequence[TrialRow], curves: FittedCurves, combinations: Sequence[KnobValues]) -> Figure:
    figure, axes = _figure("Peak memory of the process", "micro-batch (sequences)", "peak memory (GB)")
    largest = max((row.candidate.micro_batch for row in rows), default=1)
    for number, knobs in enumerate(combinations):
        color = f"C{number % 10}"
        sizes = [size for size in curves.space.micro_batches_for(knobs) if size <= 1.5 * largest]
        predicted = [curves.memory(Candidate(size, knobs)) / GB for size in sizes]
        axes.plot(sizes, predicted, color=color, alpha=0.6, linewidth=1)
        points = [row for row in rows if row.candidate.knobs == knobs and row.memory]
        axes.scatter(
            [row.candidate.micro_batch for row in points], [(row.memory or 0) / GB for row in points],
            color=color, marker="o", label=curves.space.knobs_label(knobs) or "control settings",
        )  # fmt: skip
    unfit = [row for row in rows if row.outcome in DOES_NOT_FIT]
    axes.scatter([r.candidate.micro_batch for r in unfit], [curves.limit / GB] * len(unfit), color="red", marker="x")
    axes.axhline(curves.limit / GB, color="red", linestyle="--", label="limit (crosses: did not fit)")
    axes.legend(fontsize="small")
    return figure


def _speed(rows: Sequence[TrialRow], curves: FittedCurves, combinations: Sequence[KnobValues]) -> Figure:
    """Draw the measured speeds with their intervals, the fitted curves, and the micro-batches that do not fit."""
    figure, axes = _figure("Speed", "micro-batch (sequences)", "tokens/s (95% CI)")
    axes.set_xscale("log", base=2)
    for number, knobs in enumerate(combinations):
        color = f"C{number % 10}"
        predictions = [(size, curves.speed(Candidate(size, knobs))) for size in curves.space.micro_batches_for(knobs)]
        line = [(size, speed) for size, speed in predictions if speed]
        axes.plot([size for size, _ in line], [speed for _, speed in line], color=color, alpha=0.6, linewidth=1)
        points = [
            (row.candidate.micro_batch, row.speed) for row in rows_with_speed(rows) if row.candidate.knobs == knobs
        ]
        sizes, speeds = [size for size, _ in points], [speed for _, speed in points if speed]
        middles = [speed.middle for speed in speeds]
        name = curves.space.knobs_label(knobs) or "control settings"
        axes.errorbar(sizes, middles, yerr=_error_bars(speeds), fmt="o", color=color, capsize=3, label=name)
    largest = max(
        (size for knobs in combinations for size in curves.feasible_sizes(knobs)),
        default=curves.space.micro_batches[-1],
    )
    if unfit_sizes := [size for size in curves.space.micro_batches if size > largest]:
        axes.axvspan(unfit_sizes[0], unfit_sizes[-1], color="red", alpha=0.08, label="does not fit")
    axes.legend(fontsize="small")
    return figure


def _pareto(rows: Sequence[TrialRow], memory: MemorySearcher) -> Figure:
    """Draw speed by memory, with the Pareto front: the candidates that are faster than all with less memory."""
    figure, axes = _figure("Speed by memory", "peak memory (GB)", "tokens/s")
    ranked = sorted(rank(rows), key=lambda s: s.memory)
    axes.scatter([s.memory / GB for s in ranked], [s.speed.middle for s in ranked])
    front, best = [], 0.0
    for entry in ranked:
        point = (entry.memory / GB, entry.speed.middle)
        axes.annotate(memory.space.short_label(entry.candidate), point, fontsize="x-small", clip_on=True)
        if entry.speed.middle > best:
            best = entry.speed.middle
            front.append(entry)
    axes.step([s.memory / GB for s in front], [s.speed.middle for s in front], where="post", label="Pareto front")
    axes.axvline(memory.limit / GB, color="red", linestyle="--", label="limit")
    axes.legend(fontsize="small")
    return figure


def _progress(rows: Sequence[TrialRow]) -> Figure:
    """Draw the best speed so far by the device time of the trials."""
    figure, axes = _figure("Best speed so far", "device time (s), including start-up", "tokens/s")
    speeds = ((row.outcome == "ok" and row.stage != "confirm" and row.tokens_per_second) or 0.0 for row in rows)
    axes.step(list(accumulate(row.seconds for row in rows)), list(accumulate(speeds, max)), where="post")
    return figure


def _knob_effects(rows: Sequence[TrialRow], memory: MemorySearcher) -> Figure | None:
    """Draw the effect of each knob alone: the best speed of each neighbor of the control, relative to the control."""
    best: dict[KnobValues, float] = {}
    for row in rows_with_speed(rows):
        best[row.candidate.knobs] = max(best.get(row.candidate.knobs, 0.0), row.tokens_per_second)
    control = memory.space.control.knobs
    neighbors = [knobs for knobs in memory.space.neighbors(control) if knobs in best]
    if control not in best or not neighbors:
        return None
    title = "One knob changed at a time, each at its fastest micro-batch"
    figure, axes = _figure(title, "speed change vs control settings (%)", "changed knob")
    names = [memory.space.knobs_label(knobs) for knobs in neighbors]
    axes.barh(names, [100 * (best[knobs] / best[control] - 1) for knobs in neighbors])
    axes.xaxis.set_major_formatter("{x:+.0f}%")
    return figure
