"""Charts are to scale, and keep within their picture."""

import re

import pytest

from infra.report.charts import (
    CHARACTERS,
    LABEL,
    MARKED,
    ROW,
    VALUE,
    WIDTH,
    Bar,
    Point,
    Step,
    _short,
    bars,
    lines,
    points,
    waterfall,
)

ROOM = WIDTH - LABEL - VALUE
"""Pixels for the longest bar with its interval."""


def boxes(chart: str, kind: str) -> list[tuple[float, float]]:
    """The left edge and the width of the bars of a kind."""
    found = re.findall(rf'<rect class="{kind}" x="([\d.]+)" y="[\d.]+" width="([\d.]+)"', chart)
    return [(float(left), float(width)) for left, width in found]


def intervals(chart: str) -> list[tuple[float, float]]:
    """Where intervals begin and end."""
    found = re.findall(r'<path class="interval" d="M([\d.]+) [\d.]+H([\d.]+)"', chart)
    return [(float(left), float(right)) for left, right in found]


def path(chart: str, kind: str) -> list[tuple[float, float]]:
    """The corners of the first line of a kind."""
    corners = re.findall(rf'<path class="{kind}" d="M([^"]+)"', chart)[0].split("L")
    return [(float(across), float(down)) for across, down in (corner.split() for corner in corners)]


def test_the_longest_bar_fills_the_chart_with_its_interval() -> None:
    chart = bars("Speed", [Bar("slow", 100.0, 80.0, 125.0, "100"), Bar("fast", 150.0, 140.0, 200.0, "150")])
    assert boxes(chart, "bar") == [(LABEL, ROOM / 2), (LABEL, ROOM * 0.75)]
    assert intervals(chart) == [
        (LABEL + ROOM * 0.4, LABEL + ROOM * 0.625), (LABEL + ROOM * 0.7, LABEL + ROOM),
    ]  # fmt: skip
    values = re.findall(r'<text x="([\d.]+)" y="[\d.]+">([^<]+)</text>', chart)
    assert values == [(f"{LABEL + ROOM * 0.625 + 8:.1f}", "100"), (f"{LABEL + ROOM + 8:.1f}", "150")], "behind both"
    assert f'viewBox="0 0 {WIDTH} {2 * ROW}"' in chart


def test_an_interval_that_is_too_long_is_cut_off() -> None:
    """Bars remain at least half as long as the chart is wide."""
    chart = bars("Speed", [Bar("noisy", 100.0, 50.0, 30_000.0, "100"), Bar("known", 50.0, None, None, "50")])
    assert boxes(chart, "bar") == [(LABEL, ROOM / 2), (LABEL, ROOM / 4)]
    assert intervals(chart) == [(LABEL + ROOM / 4, LABEL + ROOM)]


def test_bars_of_nothing_have_no_length() -> None:
    assert boxes(bars("Books", [Bar("up to 1,000", 0, None, None, "0")]), "bar") == [(LABEL, 0.0)]


def test_a_waterfall_goes_on_where_the_step_before_it_ends() -> None:
    steps = [Step("baseline", 0.0, 100.0, ""), Step("fast", 100.0, 200.0, ""), Step("slow", 200.0, 150.0, "")]
    chart = waterfall("Steps", steps)
    assert boxes(chart, "bar") == [(LABEL, ROOM / 2)]
    assert boxes(chart, "gain") == [(LABEL + ROOM / 2, ROOM / 2)]
    assert boxes(chart, "loss") == [(LABEL + ROOM * 0.75, ROOM / 4)]
    joints = re.findall(r'<path class="grid" d="M([\d.]+) ', chart)
    assert list(map(float, joints)) == [LABEL + ROOM / 2, LABEL + ROOM], "none below the last"


@pytest.mark.parametrize(
    ("length", "shown"), [(CHARACTERS, "x" * CHARACTERS), (CHARACTERS + 1, "x" * (CHARACTERS - 1) + "…")]
)
def test_a_long_label_is_cut_and_whole_in_its_tooltip(length: int, shown: str) -> None:
    for chart in (
        bars("Speed", [Bar("x" * length, 1.0, None, None, "1")]),
        waterfall("Steps", [Step("x" * length, 0.0, 1.0, "1")]),
        points("Speed", [Point(1.0, 1.0, "x" * length)], "x", "y"),
    ):
        assert f">{shown}</text>" in chart
        assert f"<title>{'x' * length}" in chart


def test_the_front_of_points_is_stairs() -> None:
    """To reach more of y one goes right first: what lies between two of its points is not known to be possible."""
    known = [(1.0, 1.0), (2.0, 3.0)]
    chart = points("Speed", [Point(x, y, "") for x, y in known], "GB", "tokens/s", front=known)
    first, corner, last = path(chart, "line line2")
    assert corner == (last[0], first[1])
    assert last[0] > first[0]
    assert last[1] < first[1]


def test_labels_do_not_lie_over_one_another() -> None:
    near = [Point(1.0, 1.0, "first"), Point(1.001, 1.0, "second"), Point(1.0, 0.2, "below")]
    chart = points("Speed", near, "x", "y", limit=4.0)
    assert re.findall(r">([^<]+)</text>", chart)[-2:] == ["first", "below"]
    assert chart.count("<circle") == 3


def test_points_keep_clear_of_a_limit_beyond_them() -> None:
    chart = points("Speed", [Point(1.0, 1.0, "")], "GB", "tokens/s", limit=4.0)
    (across,) = re.findall(r'<path class="limit" d="M([\d.]+) ', chart)
    (circle,) = re.findall(r'cx="([\d.]+)"', chart)
    assert float(circle) < float(across) <= WIDTH


@pytest.mark.parametrize("values", [[(5.0, 2.0)], [(5.0, 2.0), (6.0, 2.0)]], ids=["a point", "a level line"])
def test_what_does_not_vary_is_drawn_in_the_middle(values: list[tuple[float, float]]) -> None:
    chart = lines("Loss", {"training": values}, "tokens", "nats")
    first, *_ = path(chart, "line line0 dash0")
    assert first[1] == pytest.approx((26 + 260) / 2)


@pytest.mark.parametrize(("length", "marked"), [(MARKED, MARKED), (MARKED + 1, 0)])
def test_the_points_of_a_short_line_are_marked(length: int, marked: int) -> None:
    chart = lines("Loss", {"training": [(float(x), float(-x)) for x in range(length)]}, "tokens", "nats")
    assert chart.count('<circle class="dot0"') == marked


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (10.756, "10.76"), (999.0, "999"), (1000.0, "1k"), (-1500.0, "-1.5k"), (1.2e6, "1.2M"), (5e9, "5G")],
)
def test_a_number_on_an_axis_is_short(value: float, text: str) -> None:
    assert _short(value) == text
