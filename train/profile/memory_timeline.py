"""A chart of allocations over time by category, and on a GPU the allocator's history for torch's viewer.

torch determines the categories: parameters, gradients, activations, optimizer state and others.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from infra import charts

POINTS = "memory.json"
"""File with the points of the chart: the times in microseconds, and the bytes by category after a total at each."""
VIEWER = "https://pytorch.org/memory_viz"
"""torch's viewer for the file that :func:`dump` writes; the page does not send the file anywhere."""

# The order of torch's categories in an exported timeline.
CATEGORIES = ("parameters", "optimizer state", "inputs", "temporary", "activations", "gradients", "autograd", "other")
COLORS = (
    charts.BLUE, charts.GREEN, charts.BLACK, "#f0e442", charts.VERMILION, charts.PURPLE, charts.SKY, charts.ORANGE,
)  # fmt: skip
"""The eight colors of Okabe and Ito."""


def draw(recorder: torch.profiler.profile, device: str, path: Path, title: str, conditions: str) -> int:
    """Draw the memory of ``device`` over the steps of ``recorder``, and return the activations' peak in bytes.

    The ``conditions`` are the line below the ``title``, as :func:`infra.charts.describe_conditions` formats them.
    Raises the error of torch if its method does not support the model or has been removed. The method is deprecated in
    favor of the allocator's history, which only exists for CUDA.
    """
    points = path.with_name(POINTS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            recorder.export_memory_timeline(str(points), device)
        times, sizes = json.loads(points.read_text(encoding="utf-8"))
    except BaseException:
        points.unlink(missing_ok=True)
        raise
    # The first entry of each row is a total of 0.
    layers = [[row[number] for row in sizes] for number in range(1, len(CATEGORIES) + 1)]
    charts.save(draw_layers(times, layers, title, conditions), path)
    return max(layers[CATEGORIES.index("activations")], default=0)


@charts.styled
def draw_layers(times: Sequence[float], layers: Sequence[Sequence[int]], title: str, conditions: str) -> Figure:
    """Draw ``layers``, the bytes of each of :data:`CATEGORIES`, over ``times`` in microseconds.

    Memory changes at once when a block is allocated or freed, so the areas are drawn in steps.
    """
    figure, (axes,) = charts.new_figure(title, conditions)
    peak = max((sum(sizes) for sizes in zip(*layers, strict=True)), default=0)
    stack_layers(axes, times, layers, peak)
    axes.set_xlabel("time (ms)")
    charts.add_legend(axes)
    return figure


def stack_layers(axes: Axes, times: Sequence[float], layers: Sequence[Sequence[int]], highest: int) -> None:
    """Draw ``layers`` over ``times`` on ``axes``, which reach up to ``highest`` bytes, and mark their peak."""
    milliseconds = [(time - min(times)) / 1e3 for time in times]
    totals = [sum(sizes) for sizes in zip(*layers, strict=True)]
    peak = max(totals, default=0)
    divisor, unit = (1e9, "GB") if highest >= 1e9 else (1e6, "MB")
    used = [number for number, sizes in enumerate(layers) if any(sizes)]
    axes.stackplot(
        milliseconds, [[size / divisor for size in layers[number]] for number in used], step="post", linewidth=0,
        labels=[CATEGORIES[number] for number in used], colors=[COLORS[number] for number in used],
    )  # fmt: skip
    axes.set(ylabel=f"memory ({unit})", xlim=(0, max(milliseconds, default=1)))
    if peak:
        moment = milliseconds[totals.index(peak)]
        axes.axhline(peak / divisor, color=charts.GRAY, linestyle=":", linewidth=1)
        axes.annotate(
            f"peak {peak / divisor:,.1f} {unit}", (moment, peak / divisor), (0, 3), textcoords="offset points",
            ha="center", fontsize="small",
        )  # fmt: skip
    axes.set_ylim(0, 1.12 * highest / divisor or 1)
    charts.format_thousands(axes.xaxis, axes.yaxis)


@contextmanager
def history(*, cuda: bool) -> Iterator[None]:
    """Record the CUDA allocator's history during the block, for :func:`dump`."""
    if not cuda:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def dump(path: Path) -> None:
    """Write the history of the CUDA allocator as a file for :data:`VIEWER`."""
    torch.cuda.memory._dump_snapshot(str(path))
