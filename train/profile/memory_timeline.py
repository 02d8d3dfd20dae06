"""Allocations over time by category, as a picture; on a GPU also the allocator's own history as HTML.

In: a finished torch profile. Out: files. The categories are torch's: it follows which tensors become
parameters, gradients, activations and optimizer state.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

CATEGORIES = ("parameters", "optimizer state", "inputs", "temporary", "activations", "gradients", "autograd", "other")
COLOURS = ("#0072b2", "#009e73", "#000000", "#f0e442", "#d55e00", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe and Ito's eight, which the colour-blind tell apart too."""


def draw(recorder: Any, device: str, path: Path) -> Path:
    """Draw the memory of ``device`` over the steps that ``recorder`` (a torch profile) saw, in MiB."""
    from torch.profiler._memory_profiler import MemoryProfileTimeline  # the picture that torch itself draws, by name

    timeline = MemoryProfileTimeline(recorder._memory_profile())
    times, sizes = timeline._coalesce_timeline(device)
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    start = min(times, default=0)
    milliseconds = [(moment - start) / 1e3 for moment in times]
    # torch counts in microseconds, and puts a total of nothing in the first place of every row.
    layers = [[row[number + 1] / 2**20 for row in sizes] for number in range(len(CATEGORIES))]
    axes.stackplot(milliseconds, layers, labels=CATEGORIES, colors=COLOURS)
    axes.set_xlabel("milliseconds")
    axes.set_ylabel(f"MiB on {device}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper right")
    figure.savefig(path, dpi=130)
    return path


@contextmanager
def history(folder: Path, *, cuda: bool) -> Iterator[None]:
    """While the block runs, keep the CUDA allocator's history, and write it as ``memory.html`` behind it."""
    if not cuda:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=200_000, stacks="python")
    try:
        yield
        from torch.cuda._memory_viz import trace_plot

        snapshot = torch.cuda.memory._snapshot()
        (folder / "memory.html").write_text(trace_plot(snapshot), encoding="utf-8")
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
