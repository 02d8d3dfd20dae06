"""Charts of a ladder, as PNG by matplotlib: speed and memory of each rung, and the loss against tokens."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from infra.units import GB
from tune.suite.standings import Curve, Row


def speed_chart(rows: list[Row], title: str, path: Path, *, cumulative: bool) -> Path:
    """Bars of tokens/s with their intervals, annotated with peak memory.

    Where rungs are ``cumulative``, a waterfall beside it has what each one adds, relative to the controls around it.
    """
    ran = [row for row in rows if row.speed is not None]
    figure = Figure(figsize=(15 if cumulative else 9, 1.2 + 0.42 * len(ran)), layout="constrained")
    axes, *beside = figure.subplots(1, 2 if cumulative else 1, sharey=True, squeeze=False)[0]
    names = [row.name for row in ran]
    speeds = [row.speed or 0.0 for row in ran]
    reach = [[speed - (row.low or 0.0) for speed, row in zip(speeds, ran, strict=True)],
             [(row.high or 0.0) - speed for speed, row in zip(speeds, ran, strict=True)]]  # fmt: skip
    axes.barh(names, speeds, xerr=reach, color="#4477aa", ecolor="#222222", capsize=3)
    for place, row in enumerate(ran):
        axes.annotate(
            f" {(row.memory or 0) / GB:.2f} GB",
            (row.high or 0.0, place),
            va="center",
            xytext=(6, 0),
            textcoords="offset points",
        )
    axes.set_xlim(0, max(row.high or 0.0 for row in ran) * 1.18)
    axes.invert_yaxis()
    axes.set_xlabel("training tokens/s, with 95% interval")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    for waterfall in beside:
        reached = [speeds[0] * (row.total.ratio if row.total else 1.0) for row in ran]
        gains = [reached[0], *(after - before for before, after in itertools.pairwise(reached))]
        colors = ["#4477aa", *("#228833" if gain > 0 else "#cc3311" for gain in gains[1:])]
        bars = waterfall.barh(names, gains, left=[0.0, *reached[:-1]], color=colors)
        waterfall.bar_label(bars, [f"{gains[0]:,.0f}", *(f"{gain:+,.0f}" for gain in gains[1:])], padding=4)
        waterfall.set_xlabel("tokens/s that each rung adds")
        waterfall.margins(x=0.15)
        waterfall.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    return path


def band(controls: Sequence[Curve]) -> list[tuple[int, float, float]]:
    """Tokens seen, and the lowest and the highest loss of the ``controls`` there, as far as all of them ran."""
    return [
        (points[0][0], min(loss for _, loss in points), max(loss for _, loss in points))
        for points in zip(*controls, strict=False)
    ]


def loss_chart(
    losses: Mapping[str, Curve], controls: Sequence[tuple[int, float, float]], title: str, path: Path
) -> Path:
    """Training loss against tokens seen, one line per run, and the band of the ``controls``."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    for number, (name, curve) in enumerate(losses.items()):
        style = ("-", "--", ":")[number // 10 % 3]  # there are ten colours
        axes.plot([seen for seen, _ in curve], [loss for _, loss in curve], style, linewidth=1, label=name)
    low, high = [low for _, low, _ in controls], [high for _, _, high in controls]
    seen = [seen for seen, _, _ in controls]
    axes.fill_between(seen, low, high, color="grey", alpha=0.4, linewidth=0, label="control, all runs")
    axes.set_xlabel("training tokens")
    axes.set_ylabel("training loss, nats per token")
    axes.set_title(title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=130)
    return path
