"""Charts as SVG inside an HTML page, whose colours follow the page's light or dark style."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH = 760
LABEL = 210
"""Pixels for the labels on the left of bars."""
VALUE = 150
"""Pixels for the values on their right."""
ROW = 26
CHARACTERS = 30
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
        short = label if len(label) <= CHARACTERS else label[: CHARACTERS - 1] + "…"
        parts.append(f"<g><title>{escape(f'{label}: {text}')}</title>")
        parts.append(f'<text x="{LABEL - 8}" y="{middle + 4}" text-anchor="end">{escape(short)}</text>')
        parts.append(f'<rect class="bar" x="{LABEL}" y="{top + 5}" width="{value * scale:.1f}" height="{ROW - 10}"/>')
        if low is not None and high is not None:
            left, right = LABEL + low * scale, min(LABEL + high * scale, WIDTH - VALUE)
            parts.append(f'<path class="interval" d="M{left:.1f} {middle}H{right:.1f}"/>')
            end = max(end, right)
        parts.append(f'<text x="{end + 8:.1f}" y="{middle + 4}">{escape(text)}</text></g>')
    return _figure(title, WIDTH, len(rows) * ROW, parts)


def lines(title: str, series: Mapping[str, Sequence[tuple[float, float]]], x: str, y: str) -> str:
    """Lines over a common x axis, one per series, which a legend names; ``x`` and ``y`` are what the axes show."""
    height, left, bottom, right, top = 300, 66, 40, 14, 26
    points = [point for line in series.values() for point in line]
    (x0, x1), (y0, y1) = (_range([point[axis] for point in points]) for axis in (0, 1))

    def place(point: tuple[float, float]) -> str:
        across = left + (point[0] - x0) / (x1 - x0) * (WIDTH - left - right)
        return f"{across:.1f} {top + (y1 - point[1]) / (y1 - y0) * (height - top - bottom):.1f}"

    parts = []
    for step in range(5):
        at_x, at_y = x0 + (x1 - x0) * step / 4, y0 + (y1 - y0) * step / 4
        (px, _), (_, py) = place((at_x, y0)).split(), place((x0, at_y)).split()
        parts.append(f'<path class="grid" d="M{left} {py}H{WIDTH - right}"/>')
        parts.append(f'<text x="{left - 8}" y="{float(py) + 4:.1f}" text-anchor="end">{_short(at_y)}</text>')
        anchor = "end" if step == 4 else "middle"
        parts.append(f'<text x="{px}" y="{height - bottom + 18}" text-anchor="{anchor}">{_short(at_x)}</text>')
    parts.append(f'<text x="{left}" y="14">{escape(y)}</text>')
    parts.append(f'<text x="{WIDTH - right}" y="{height - 4}" text-anchor="end">{escape(x)}</text>')
    for number, (name, line) in enumerate(series.items()):
        parts.append(f'<path class="line line{number % 4}" d="M{"L".join(map(place, line))}"/>')
        if not name:
            continue
        across = WIDTH - right - 130 * (len(series) - number)
        parts.append(f'<path class="line line{number % 4}" d="M{across} 10h20"/>')
        parts.append(f'<text x="{across + 26}" y="14">{escape(name)}</text>')
    return _figure(title, WIDTH, height, parts)


def _short(value: float) -> str:
    """A number in four digits: ``10.76``, ``12.29k``, ``1.2M``."""
    for unit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{suffix}"
    return f"{value:.4g}"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest of ``values``, never equal."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _figure(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    chart = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return f"<figure><figcaption>{escape(title)}</figcaption>{chart}</figure>"
