"""Charts as SVG inside an HTML page, whose colours follow the page's light or dark style."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH = 760
LABEL = 230
"""Pixels for the labels on the left of bars."""
VALUE = 150
"""Pixels for the values on their right."""
ROW = 26
CHARACTERS = 33
"""Of a label; the whole is in its tooltip."""


class Bar(NamedTuple):
    """One bar: its label, its length, its 95% interval if there is one, and the text that stands at its end."""

    label: str
    value: float
    low: float | None
    high: float | None
    text: str


def bars(title: str, rows: Sequence[Bar]) -> str:
    """Horizontal bars with intervals, the longest as wide as the chart."""
    longest = max((row.high or row.value for row in rows), default=0.0) or 1.0
    # An interval of a very noisy measurement can be hundreds of times as long as any bar.
    longest = min(longest, 2 * max(row.value for row in rows)) or 1.0
    scale = (WIDTH - LABEL - VALUE) / longest
    parts = []
    for number, (label, value, low, high, text) in enumerate(rows):
        top, end = number * ROW, LABEL + value * scale
        middle = top + ROW / 2
        parts.append(f"<g><title>{escape(f'{label}: {text}')}</title>")
        parts.append(f'<text x="{LABEL - 8}" y="{middle + 4}" text-anchor="end">{escape(_cut(label))}</text>')
        parts.append(f'<rect class="bar" x="{LABEL}" y="{top + 5}" width="{value * scale:.1f}" height="{ROW - 10}"/>')
        if low is not None and high is not None:
            left, right = LABEL + low * scale, min(LABEL + high * scale, WIDTH - VALUE)
            parts.append(f'<path class="interval" d="M{left:.1f} {middle}H{right:.1f}"/>')
            end = max(end, right)
        parts.append(f'<text x="{end + 8:.1f}" y="{middle + 4}">{escape(text)}</text></g>')
    return _figure(title, WIDTH, len(rows) * ROW, parts)


class Step(NamedTuple):
    """A step of a waterfall: its label, the values before and after it, and the text that stands at its end."""

    label: str
    before: float
    after: float
    text: str


def waterfall(title: str, rows: Sequence[Step]) -> str:
    """Bars from the value before each step to that after it, one below the other."""
    scale = (WIDTH - LABEL - VALUE) / (max(value for row in rows for value in (row.before, row.after)) or 1.0)
    parts = []
    for number, (label, before, after, text) in enumerate(rows):
        top, (left, right) = number * ROW, sorted((LABEL + before * scale, LABEL + after * scale))
        kind = "bar" if not before else "gain" if after >= before else "loss"
        parts.append(f"<g><title>{escape(f'{label}: {text}')}</title>")
        parts.append(f'<text x="{LABEL - 8}" y="{top + ROW / 2 + 4}" text-anchor="end">{escape(_cut(label))}</text>')
        width = max(right - left, 1.0)
        parts.append(f'<rect class="{kind}" x="{left:.1f}" y="{top + 5}" width="{width:.1f}" height="{ROW - 10}"/>')
        if number + 1 < len(rows):
            end = LABEL + after * scale
            parts.append(f'<path class="grid" d="M{end:.1f} {top + ROW - 5}V{top + ROW + 5}"/>')
        parts.append(f'<text x="{right + 8:.1f}" y="{top + ROW / 2 + 4}">{escape(text)}</text></g>')
    return _figure(title, WIDTH, len(rows) * ROW, parts)


class Point(NamedTuple):
    """A point of a chart, and what it is."""

    x: float
    y: float
    label: str


def points(
    title: str,
    shown: Sequence[Point],
    x: str,
    y: str,
    *,
    limit: float | None = None,
    front: Sequence[tuple[float, float]] = (),
    equal: bool = False,
) -> str:
    """Points over two axes that begin at 0, with the labels for which there is room; all are in tooltips.

    ``limit`` is drawn across the x axis and ``front`` as stairs; ``equal`` draws the line on which both values are
    the same.
    """
    most = max([point.x for point in shown] + [limit or 0.0]) * 1.05
    plane = _Plane((0.0, most), (0.0, max(point.y for point in shown) * 1.1), x, y)
    parts = plane.parts
    if equal:
        end = min(plane.x[1], plane.y[1])
        parts.append(f'<path class="grid" d="M{plane.place((0.0, 0.0))}L{plane.place((end, end))}"/>')
    if limit is not None:
        (across, top), (_, bottom) = (plane.place((limit, value)).split() for value in reversed(plane.y))
        parts.append(f'<path class="limit" d="M{across} {top}V{bottom}"/>')
        parts.append(f'<text x="{float(across) - 6:.1f}" y="{float(top) + 12:.1f}" text-anchor="end">limit</text>')
    if front:
        corners = [front[0]]
        for point in front[1:]:
            corners += [(point[0], corners[-1][1]), point]
        parts.append(f'<path class="line line2" d="M{"L".join(map(plane.place, corners))}"/>')
    labelled: list[tuple[float, float]] = []
    for point in shown:
        across, down = plane.place((point.x, point.y)).split()
        parts.append(
            f'<circle class="bar" cx="{across}" cy="{down}" r="4"><title>{escape(point.label)}</title></circle>'
        )
        anchor, aside = ("end", -8) if float(across) > 0.75 * WIDTH else ("start", 8)
        at = (float(across) + aside, float(down) - 6)
        if all(abs(at[1] - y) > 12 or abs(at[0] - x) > 200 for x, y in labelled):  # else one would lie over another
            labelled.append(at)
            parts.append(
                f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" text-anchor="{anchor}">{escape(_cut(point.label))}</text>'
            )
    return _figure(title, WIDTH, plane.height, parts)


MARKED = 12
"""Most points of a line that are marked each."""


class _Plane:
    """Two axes with a grid, and where values are between them."""

    height, left, bottom, right, top = 300, 66, 40, 14, 26

    def __init__(self, across: tuple[float, float], up: tuple[float, float], x: str, y: str) -> None:
        self.x, self.y = across, up
        self.parts: list[str] = []
        for tick in _ticks(*up):
            height = float(self.place((across[0], tick)).split()[1])
            self.parts.append(f'<path class="grid" d="M{self.left} {height}H{WIDTH - self.right}"/>')
            self.parts.append(f'<text x="{self.left - 8}" y="{height + 4:.1f}" text-anchor="end">{_short(tick)}</text>')
        for tick in _ticks(*across):
            place, down = self.place((tick, up[0])).split()[0], self.height - self.bottom + 18
            self.parts.append(f'<text x="{place}" y="{down}" text-anchor="middle">{_short(tick)}</text>')
        self.parts.append(f'<text x="{self.left}" y="14">{escape(y)}</text>')
        self.parts.append(
            f'<text x="{WIDTH - self.right}" y="{self.height - 4}" text-anchor="end">{escape(x)}</text>'
        )  # fmt: skip

    def place(self, point: tuple[float, float]) -> str:
        """The pixels of ``point``, for a path."""
        (x0, x1), (y0, y1) = self.x, self.y
        across = self.left + (point[0] - x0) / (x1 - x0) * (WIDTH - self.left - self.right)
        down = self.top + (y1 - point[1]) / (y1 - y0) * (self.height - self.top - self.bottom)
        return f"{across:.1f} {down:.1f}"


def lines(
    title: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    x: str,
    y: str,
    *,
    band: tuple[str, Sequence[tuple[float, float, float]]] = ("", ()),
    limit: float | None = None,
) -> str:
    """Lines over a common x axis, one per series, which a legend names; ``x`` and ``y`` are what the axes show.

    ``band`` is a name and an area behind the lines, given by its edges at each x; ``limit`` is drawn across the y axis.
    """
    what, area = band
    values = [point for line in series.values() for point in line]
    values += [(across, edge) for across, *edges in area for edge in edges]
    heights = [up for _, up in values] + ([limit] if limit else [])
    plane = _Plane(_range([across for across, _ in values]), _range(heights), x, y)
    parts, legend = plane.parts, []
    if area:
        edge = [(across, low) for across, low, _ in area] + [(across, high) for across, _, high in reversed(area)]
        parts.append(f'<path class="band" d="M{"L".join(map(plane.place, edge))}Z"/>')
        legend.append(("band", what))
    if limit:
        height = plane.place((plane.x[0], limit)).split()[1]
        parts.append(f'<path class="limit" d="M{plane.left} {height}H{WIDTH - plane.right}"/>')
        legend.append(("limit", "limit"))
    for number, (name, line) in enumerate(series.items()):
        kind = f"line line{number % 4} dash{number // 4 % 4}"
        parts.append(
            f'<path class="{kind}" d="M{"L".join(map(plane.place, line))}"><title>{escape(name)}</title></path>'
        )
        if len(line) <= MARKED:
            places = [plane.place(point).split() for point in line]
            parts += [f'<circle class="dot{number % 4}" cx="{left}" cy="{top}" r="3"/>' for left, top in places]
        if name:
            legend.append((kind, name))
    return _figure(title, WIDTH, plane.height, parts, legend)


def _cut(label: str) -> str:
    return label if len(label) <= CHARACTERS else label[: CHARACTERS - 1] + "…"


def _short(value: float) -> str:
    """A number in four digits: ``10.76``, ``12.29k``, ``1.2M``."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.4g}"


def _ticks(low: float, high: float) -> list[float]:
    """The round numbers between ``low`` and ``high``: three to seven, 1, 2 or 5 times a power of ten apart."""
    power = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = max(power * factor for factor in (1, 2, 5) if power * factor <= (high - low) / 3 * (1 + 1e-9))
    return [step * number for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest of ``values``, never equal."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _figure(title: str, width: int, height: int, parts: Sequence[str], legend: Sequence[tuple[str, str]] = ()) -> str:
    """A chart, and below it a line for each entry of the legend: how it is drawn, and what it is."""
    chart = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    key = "".join(
        f'<span><svg viewBox="0 0 24 8"><path class="{kind}" d="M0 4h24"/></svg> {escape(name)}</span>'
        for kind, name in legend
    )
    key = f'<p class="legend">{key}</p>' if key else ""
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}{key}</figure>"
