"""The style of all charts, and what they have in common: a title, number formats, labels beside points.

A drawing function is decorated with :func:`styled`, begins with :func:`new_figure` and ends with :func:`save`. The
background is white and opaque, because pages in dark mode would make text on a transparent background unreadable.
"""

import math
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.rcsetup import cycler
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from infra.cli.units import GB

BLUE, ORANGE, GREEN, PURPLE, SKY, BLACK, VERMILION = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#333333", "#d55e00",
)  # fmt: skip
"""Colors that color-blind people can distinguish, by Okabe and Ito. Vermilion is for the winner and for failures."""
GRAY, LIGHT_GRAY = "#6b6b6b", "#e4e4e4"
"""Colors of secondary text, and of grids."""
SERIES_COLORS = (BLUE, ORANGE, GREEN, PURPLE, SKY, BLACK)
MARKERS = ("o", "s", "^", "D", "v", "P")
"""Shapes of points; series differ in shape and color."""

WIDTH, HEIGHT = 6.4, 4.0
"""Size of a chart in inches. Its text is still readable if the chart is shown at 40% of its size."""

LEGEND_CHARACTERS = 68
"""Maximum length of a row of a legend, with six characters per label for its symbol and gaps."""

STYLE: dict[Any, Any] = {
    "figure.figsize": (WIDTH, HEIGHT), "figure.constrained_layout.use": True,
    "figure.constrained_layout.h_pad": 0.06, "figure.constrained_layout.w_pad": 0.08,
    "savefig.dpi": 160, "savefig.facecolor": "white", "figure.facecolor": "white", "axes.facecolor": "white",
    "font.size": 11, "axes.labelsize": 10, "xtick.labelsize": 10, "ytick.labelsize": 10, "legend.fontsize": 10,
    "text.color": BLACK, "axes.labelcolor": GRAY, "xtick.color": GRAY, "ytick.color": GRAY,
    "axes.spines.left": False, "axes.spines.right": False, "axes.spines.top": False, "axes.spines.bottom": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": LIGHT_GRAY, "grid.linewidth": 0.8,
    "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0,
    "axes.prop_cycle": cycler(color=SERIES_COLORS), "lines.linewidth": 1.6, "lines.markersize": 6,
    "errorbar.capsize": 3, "legend.frameon": False, "legend.borderaxespad": 0.2, "legend.handlelength": 1.6,
    # Text in an SVG remains text, and the same chart is the same file each time.
    "svg.fonttype": "none", "svg.hashsalt": "throughline",
}  # fmt: skip
"""Settings of matplotlib for all charts."""

styled = rc_context(STYLE)
"""Decorator of functions that draw charts in this project's style."""


def describe_conditions(device: str, limit: float | None, when: datetime | None = None) -> str:
    """Return the line below a title: the device, its memory limit in bytes, and the time, by default now."""
    limit_text = f"memory limit {_format_size(limit / GB)}" if limit else ""
    return " · ".join(filter(None, (device, limit_text, f"{when or datetime.now():%Y-%m-%d %H:%M}")))


def _format_size(size: float, unit: str = "GB") -> str:
    return f"{round(size, 1):,g} {unit}"


def new_figure(title: str, conditions: str = "", *, height: float = HEIGHT, **grid: Any) -> tuple[Figure, list[Axes]]:
    """Create a figure with a ``title``, which is wrapped, the ``conditions`` below it, and axes.

    ``height`` is in inches, and ``grid`` are arguments of matplotlib's ``Figure.subplots``. Returns: (figure, its axes
    from left to right and from top to bottom).
    """
    figure = Figure(figsize=(WIDTH, height))
    title = re.sub(r",(?=[a-z])", ", ", title)  # Lines are only broken at spaces, and a model has none.
    figure.suptitle(title, x=0.015, ha="left", fontsize=13, fontweight="bold", wrap=True)
    # A figure has only one title, so the second line is the title of a figure inside.
    inner = figure.add_subfigure(figure.add_gridspec()[0, 0])
    if conditions:
        inner.suptitle(conditions, x=0.015, ha="left", fontsize=10, color=GRAY, wrap=True)
    return figure, [*inner.subplots(squeeze=False, **grid).flat]


def add_source(figure: Figure, source: str) -> None:
    """Write the ``source`` of the data below the chart."""
    figure.supxlabel(source, x=0.015, ha="left", fontsize=8, color=GRAY, wrap=True)


@styled
def save(figure: Figure, file: Path | IO[bytes], file_format: str = "png") -> None:
    """Write ``figure`` to ``file``; ticks and text are made while it is written, in this project's style."""
    figure.savefig(file, format=file_format, metadata={"Date": None} if file_format == "svg" else None)


def format_thousands(*axes: Axis) -> None:
    """Write the numbers of the ``axes`` with thousands separators, and few enough of them to be readable."""
    for axis in axes:
        axis.set_major_locator(MaxNLocator(6))
        axis.set_major_formatter("{x:,.10g}")


def scale_of(maximum: float) -> tuple[float, str]:
    """Return (divisor, unit) for the label of an axis up to ``maximum``, such as (10^6, " (millions)")."""
    for divisor, unit in ((1e9, " (billions)"), (1e6, " (millions)"), (1e3, " (thousands)")):
        if maximum >= 10 * divisor:
            return divisor, unit
    return 1.0, ""


def add_legend(axes: Axes) -> None:
    """Add a legend above ``axes``, where it hides no data, and make the figure higher by the legend's rows."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    columns = max(1, min(len(labels), LEGEND_CHARACTERS // (max(map(len, labels)) + 6)))
    axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns)
    figure = _figure_of(axes)
    figure.set_figheight(figure.get_figheight() + 0.21 * math.ceil(len(labels) / columns))


def _figure_of(axes: Axes) -> Figure:
    figure = axes.get_figure(root=True)
    assert isinstance(figure, Figure), "all axes belong to a figure"
    return figure


def mark_limit(axes: Axes, limit: float, *, vertical: bool, unit: str = "GB", text: str = "") -> None:
    """Mark a memory ``limit`` by a line with its value, or any limit by a line with ``text``."""
    text = text or f"limit {_format_size(limit, unit)}"
    (axes.axvline if vertical else axes.axhline)(limit, color=VERMILION, linestyle="--", linewidth=1.2)
    point, coordinates = (
        ((limit, 1), ("data", "axes fraction")) if vertical else ((1, limit), ("axes fraction", "data"))
    )
    axes.annotate(
        text, point, (0, 3), xycoords=coordinates, textcoords="offset points", ha="right", va="bottom",
        color=VERMILION, fontsize="small",
    )  # fmt: skip


_OFFSETS = (
    (-9, 0, "right", "center"), (0, 8, "center", "bottom"), (9, 0, "left", "center"), (-5, 5, "right", "bottom"),
    (5, 5, "left", "bottom"), (5, -5, "left", "top"), (-5, -5, "right", "top"), (0, -8, "center", "top"),
)  # fmt: skip
"""Positions of a label beside its point: (points to the right, points up, horizontal, vertical alignment)."""


def label_points(axes: Axes, points: Sequence[tuple[float, float]], labels: Sequence[str]) -> None:
    """Write ``labels`` beside their ``points``, the most important first.

    A label is left out if it would hide a point or another label at each of its positions. Call this when everything
    else is drawn, because the positions depend on the limits of the axes.
    """
    figure = _figure_of(axes)
    figure.draw_without_rendering()
    half = 4 * figure.dpi / 72
    occupied = [
        Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in axes.transData.transform([*points])
    ]
    for point, label in zip(points, labels, strict=True):
        for right, up, horizontal, vertical in _OFFSETS:
            text = axes.annotate(
                label, point, (right, up), textcoords="offset points", ha=horizontal, va=vertical, fontsize="small",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5},
            )  # fmt: skip
            box = text.get_window_extent()
            inside = axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and axes.bbox.y0 <= box.y0 <= axes.bbox.y1
            if inside and not any(box.overlaps(other) for other in occupied):
                occupied.append(box)
                break
            text.remove()
