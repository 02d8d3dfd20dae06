"""Charts of a ladder: the speeds and losses of its rungs, and a published study."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from matplotlib.figure import Figure

from infra import charts
from tune.reporting.charts import SpeedRow, draw_speeds, height_of, name_rows
from tune.trial.row import Curve, TrialRow


@charts.styled
def draw_rungs(title: str, conditions: str, rows: Sequence[SpeedRow], cumulative: Sequence[float] = ()) -> Figure:
    """Draw the speeds of a ladder's rungs.

    With the ``cumulative`` tokens/s after each rung, a second panel is a waterfall of the tokens/s that each rung adds.
    """
    names = [row.name for row in rows]
    panels = 2 if cumulative else 1
    figure, axes = charts.new_figure(title, conditions, height=panels * height_of(names), nrows=panels)
    draw_speeds(axes[0], rows, "rung")
    for waterfall in axes[1:]:
        gains = [speed - previous_speed for previous_speed, speed in pairwise([0.0, *cumulative])]
        colors = [charts.ORANGE if gain < 0 else charts.GREEN for gain in gains]
        bars = waterfall.barh(range(len(gains)), gains, 0.6, left=[0.0, *cumulative[:-1]], color=colors)
        waterfall.bar_label(bars, [f"{gain:+,.0f}" for gain in gains], padding=4, fontsize="small")
        name_rows(waterfall, names, "rung")
        waterfall.set_xlabel("tokens/s added by each rung")
        waterfall.set_xlim(right=1.2 * max(cumulative))
        charts.format_thousands(waterfall.xaxis)
    return figure


@charts.styled
def draw_losses(
    title: str, conditions: str, runs: Sequence[tuple[str, TrialRow]], controls: Sequence[TrialRow]
) -> Figure:
    """Draw the training loss by training tokens, with a line per run and the range of the ``controls``."""
    figure, (axes,) = charts.new_figure(title, conditions)
    divisor, unit = charts.scale_of(max((row.curve[-1][0] for _, row in runs if row.curve), default=0))
    for number, (name, row) in enumerate(runs):
        colors = len(charts.SERIES_COLORS)
        style = ("-", "--", ":", "-.")[number // colors % 4]
        tokens, losses = zip(*row.curve, strict=True)
        axes.plot(
            [count / divisor for count in tokens], losses, style, color=charts.SERIES_COLORS[number % colors],
            linewidth=1.2, label=name,
        )  # fmt: skip
    tokens, low, high = zip(*band([row.curve for row in controls]), strict=True)
    label = f"range of {len(controls)} control runs"
    axes.fill_between(
        [count / divisor for count in tokens], low, high, color=charts.GRAY, alpha=0.35, linewidth=0, label=label
    )
    axes.set(xlabel=f"training tokens{unit}", ylabel="training loss (nats/token)")
    charts.format_thousands(axes.xaxis)
    charts.add_legend(axes)
    return figure


def band(controls: Sequence[Curve]) -> list[tuple[int, float, float]]:
    """Compute (training tokens, lowest loss, highest loss) of the ``controls``, up to the length of the shortest."""
    return [
        (points[0][0], min(loss for _, loss in points), max(loss for _, loss in points))
        for points in zip(*controls, strict=False)
    ]


@charts.styled
def grouped_bars(
    title: str, conditions: str, rungs: Sequence[str],
    panels: Mapping[str, Mapping[str, Sequence[float | None]]], source: str,
) -> Figure:  # fmt: skip
    """Draw grouped bars for the ``rungs``, the first rung at the top, with a panel per quantity and a bar per series.

    ``panels`` has the values of the rungs by the quantity with its unit, and by the label of the bars; None is shown as
    a dash. The ``source`` is a text below the chart.
    """
    height = 1.2 + sum(0.6 + 0.19 * len(bars) * len(rungs) for bars in panels.values())
    figure, all_axes = charts.new_figure(title, conditions, height=height, nrows=len(panels))
    for axes, (quantity, bars) in zip(all_axes, panels.items(), strict=True):
        thickness = 0.84 / len(bars)
        for number, (label, values) in enumerate(bars.items()):
            color = (charts.BLACK, charts.SKY, charts.BLUE, charts.ORANGE)[number % 4]
            positions = [rung + (number - (len(bars) - 1) / 2) * thickness for rung in range(len(rungs))]
            lengths = [value or 0.0 for value in values]
            group = axes.barh(positions, lengths, 0.9 * thickness, color=color, label=label)
            texts = ["–" if v is None else f"{v:,.{2 if v < 10 else 1 if v < 100 else 0}f}" for v in values]
            background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            axes.bar_label(group, texts, padding=3, fontsize=8, color=charts.GRAY, bbox=background)
        axes.set_yticks(range(len(rungs)), rungs, color=charts.BLACK)
        axes.set_ylim(len(rungs) - 0.45, -0.55)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(quantity)
        axes.margins(x=0.13)
        charts.format_thousands(axes.xaxis)
        charts.add_legend(axes)
    charts.add_source(figure, source)
    return figure
