"""A chart of allocations over time by category, and on a GPU the allocator's history for torch's viewer.

torch determines the categories: parameters, gradients, activations, optimizer state and others.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from matplotlib.figure import Figure

VIEWER = "https://pytorch.org/memory_viz"
"""torch's viewer for the file that :func:`dump` writes; the page does not send the file anywhere."""

# The order of torch's categories in an exported timeline.
CATEGORIES = ("parameters", "optimizer state", "inputs", "temporary", "activations", "gradients", "autograd", "other")
COLORS = ("#0072b2", "#009e73", "#000000", "#f0e442", "#d55e00", "#cc79a7", "#56b4e9", "#e69f00")
"""The eight colors of Okabe and Ito, which color-blind people can distinguish."""


def draw(recorder: torch.profiler.profile, device: str, path: Path) -> int:
    """Draw the memory of ``device`` in MB over the steps of ``recorder``, and return the activations' peak in bytes.

    Raises the error of torch if its method does not support the model or has been removed. The method is deprecated in
    favor of the allocator's history, which only exists for CUDA.
    """
    points = path.with_suffix(".json")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            recorder.export_memory_timeline(str(points), device)
        times, sizes = json.loads(points.read_text(encoding="utf-8"))
    finally:
        points.unlink(missing_ok=True)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    start = min(times, default=0)
    milliseconds = [(time - start) / 1e3 for time in times]  # torch's times are in microseconds.
    # The first entry of each row is a total of 0.
    layers = [[row[number + 1] / 1e6 for row in sizes] for number in range(len(CATEGORIES))]
    axes.stackplot(milliseconds, layers, labels=CATEGORIES, colors=COLORS)
    axes.set_xlabel("time (ms)")
    axes.set_ylabel(f"memory of {device} (MB)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper right")
    figure.savefig(path, dpi=130)
    return max((row[CATEGORIES.index("activations") + 1] for row in sizes), default=0)


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
