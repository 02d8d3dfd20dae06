"""The charts of a ladder show each rung with its memory, and in a cumulative suite what it adds."""

import numpy as np
from matplotlib.patches import Rectangle

from train.intervals import Estimate
from tune.reporting.charts import SpeedRow
from tune.suite.charts import draw_rungs, grouped_bars

ROWS = [
    SpeedRow("baseline", Estimate(1000, 980, 1020), 5 * 10**9),
    SpeedRow("compile", Estimate(1600, 1580, 1620), 4 * 10**9, "fastest", is_winner=True),
    SpeedRow("another kernel", Estimate(1500, 1400, 1600), 3 * 10**9),
]


def test_each_rung_has_its_memory_and_the_fastest_is_marked() -> None:
    (axes,) = draw_rungs("Suite: speed", "cpu", ROWS).axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [row.name for row in ROWS]
    assert {"5.00 GB", "4.00 GB · fastest", "3.00 GB"} <= {text.get_text() for text in axes.texts}
    assert [np.asarray(line.get_ydata()).tolist() for line in axes.lines if line.get_marker() == "*"] == [[1]]


def test_a_cumulative_suite_shows_what_each_rung_adds() -> None:
    _, waterfall = draw_rungs("Suite: speed", "cpu", ROWS, [1000.0, 1600.0, 1500.0]).axes
    assert [bar.get_width() for bar in waterfall.patches if isinstance(bar, Rectangle)] == [1000, 600, -100]
    assert {"+1,000", "+600", "-100"} <= {text.get_text() for text in waterfall.texts}


def test_a_comparison_has_its_values_and_its_source() -> None:
    panels = {"GPU memory (GiB)": {"study": [37.0, 36.9]}, "tokens/s": {"study": [16_950.0, 40_950.0]}}
    figure = grouped_bars("A study", "NVIDIA A100", ["baseline", "tensor cores"], panels, "Source: its log")
    memory, speed = figure.axes
    assert {"37.0", "36.9"} <= {text.get_text() for text in memory.texts}
    assert {"16,950", "40,950"} <= {text.get_text() for text in speed.texts}
    assert figure.get_supxlabel() == "Source: its log"
