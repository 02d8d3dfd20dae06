"""The common style of all charts: titles, numbers and labels that a reader can see."""

from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from infra import charts


@charts.styled
def drawn(title: str = "A chart", conditions: str = "cpu · 2026-11-28 07:00") -> tuple[Figure, Axes]:
    figure, (axes,) = charts.new_figure(title, conditions)
    axes.plot([0, 2000], [10_000, 130_000], label="speed")
    return figure, axes


def test_conditions_have_the_device_the_limit_and_the_time() -> None:
    when = datetime(2026, 11, 28, 7, 5)
    assert charts.describe_conditions("NVIDIA A100", 40 * 10**9, when) == (
        "NVIDIA A100 · memory limit 40 GB · 2026-11-28 07:05"
    )
    assert charts.describe_conditions("cpu", None, when) == "cpu · 2026-11-28 07:05"


@pytest.mark.parametrize(
    "title", ["A title that is far too long for one line of a chart with its usual width", f"gpt2{',layers=3' * 12}"]
)
def test_no_title_is_cut(title: str) -> None:
    figure, _ = drawn(title)
    figure.draw_without_rendering()
    texts = [text for part in (figure, *figure.subfigs) for text in part.texts]
    assert len(texts) == 2
    boxes = [text.get_window_extent() for text in texts]
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    assert not boxes[0].overlaps(boxes[1])


def test_a_picture_has_no_frame_and_an_opaque_background(tmp_path: Path) -> None:
    """A page in dark mode would make the text on a transparent one unreadable."""
    figure, axes = drawn()
    charts.save(figure, tmp_path / "chart.png")
    assert not any(spine.get_visible() for spine in axes.spines.values())
    pixels = np.asarray(imread(tmp_path / "chart.png"))
    assert (pixels[..., 3] == 1).all()
    assert (pixels[0, 0, :3] == 1).all()


def test_the_same_chart_is_the_same_svg(tmp_path: Path) -> None:
    for name in ("first.svg", "second.svg"):
        charts.save(drawn()[0], tmp_path / name, "svg")
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_numbers_have_thousands_separators() -> None:
    figure, axes = drawn()
    charts.format_thousands(axes.xaxis, axes.yaxis)
    figure.draw_without_rendering()
    assert "100,000" in [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize(("maximum", "unit"), [(900, ""), (50_000, " (thousands)"), (3e9, " (millions)")])
def test_tokens_are_counted_in_a_unit_of_their_size(maximum: float, unit: str) -> None:
    divisor, text = charts.scale_of(maximum)
    assert text == unit
    assert maximum / divisor < 10_000


def test_labels_do_not_overlap_and_the_first_one_is_shown() -> None:
    points = [(1000.0, 70_000.0 + 200 * number) for number in range(30)]
    figure, axes = drawn()
    charts.label_points(axes, points, [f"{number} x 4 compile=off" for number in range(30)])
    figure.draw_without_rendering()
    texts = [text.get_text() for text in axes.texts]
    boxes = [text.get_window_extent() for text in axes.texts]
    assert texts[0] == "0 x 4 compile=off"
    assert len(texts) < 30
    assert not any(box.overlaps(other) for number, box in enumerate(boxes) for other in boxes[:number])


def test_a_legend_makes_the_figure_higher_and_hides_no_data() -> None:
    figure, axes = drawn()
    height = figure.get_figheight()
    charts.add_legend(axes)
    figure.draw_without_rendering()
    legend = axes.get_legend()
    assert legend is not None
    assert figure.get_figheight() > height
    assert legend.get_window_extent().y0 >= axes.bbox.y1 - 1
