"""The study of GPT-2 on an A100, and what a textbook loop and this project need for its rungs: memory and step time.

The study trained GPT-2 124M at a context length of 512 on one A100 with 40 GB in a notebook, for about five minutes per
rung. It measured each change at the batch of the previous rung, and then with a larger batch.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from infra.charts import mark_limit
from infra.cli.table import Table
from infra.device.hardware import A100 as STUDY_GPU
from train.config import ResolvedConfig, TrainConfig
from train.estimate.breakdown import CONTEXT
from train.estimate.gpu_rates import ACHIEVABLE_FRACTION
from train.estimate.memory import predict_peak
from train.resolved import resolve
from tune.suite import charts
from tune.suite.catalog import A100
from tune.suite.published import STUDY, VALIDATION
from tune.suite.runs import SAME_BATCH, RungResult
from tune.suite.suites import apply_changes

GIB = 2**30
"""The study's unit of memory."""


@dataclass(frozen=True)
class RungNeeds:
    """Memory and step time that a textbook loop needs on an A100 at one rung."""

    gib: float
    """Memory reserved by torch's allocator plus the CUDA context, in GiB."""
    seconds: float
    """Minimum time of a step in seconds, by the roofline of its kernels."""
    project_seconds: float | None
    """Minimum time of a step of this project in seconds; None if the record does not have the rung."""


RECORD = json.loads(Path(__file__).with_name("textbook.json").read_text(encoding="utf-8"))
"""Record of ``make record-textbook``."""


def read_textbook() -> dict[str, RungNeeds]:
    """Read the record by rung, with the names of the suite and of :func:`memory_table`.

    A rung that is missing in the record, such as a change of data loading, has the values of the previous rung.
    """
    needs = {
        row["rung"]: RungNeeds((row["reserved"] + CONTEXT["cuda"]) / GIB, row["seconds"], row.get("our_seconds"))
        for row in RECORD["rows"]
    }
    previous_name = "baseline"
    for name in STUDY:
        needs.setdefault(name, needs[previous_name])
        previous_name = name
    return needs


def study_rungs() -> Iterator[tuple[str, ResolvedConfig]]:
    """Yields: (name, config) of each of the study's rungs at its final batch, resolved for an A100."""
    config = apply_changes(TrainConfig.of(device="cuda"), A100.base)
    yield "baseline", resolve(config, STUDY_GPU)
    for rung in A100.rungs:
        if rung.name in STUDY:
            config = apply_changes(config, rung.changes)
            yield rung.name, resolve(config, STUDY_GPU)


MEMORY = (
    '"textbook" is a training loop as textbooks write it: with dropout, with GELU and normalization as separate '
    "operations, and with the loss outside the compiled model. Its memory was measured at each rung as the memory "
    "reserved by torch's allocator plus the CUDA context. \"predicted\" is this project's rung at the study's batch."
)
"""Note that explains the columns of :func:`memory_table`."""


def memory_table(rows: Mapping[str, RungResult]) -> Table:
    """Build the table of memory in the study, of a textbook loop, as predicted and, with ``rows`` by name, as measured.

    A rung with a larger batch has two rows, the first one at the batch of the previous rung.
    """
    cells: list[tuple[str, ...]] = []
    needs, batch = read_textbook(), 0
    for name, config in study_rungs():
        published = STUDY[name]
        for rung, size, gib in (
            (name + SAME_BATCH, batch, published.same_batch_gib), (name, published.batch, published.gib),
        ):  # fmt: skip
            if gib is None:
                continue
            predicted = predict_peak(config.step.replace(micro_batch=size, global_batch=size)).total / GIB
            values = rung, f"{size}", *(f"{number:.1f}" for number in (gib, needs[rung].gib, predicted))
            row = rows.get(rung, RungResult(rung))
            row_memory = f"{row.memory / GIB:.1f}" if row.memory else "-"
            cells.append((*values, row_memory, row.batch or "-") if rows else values)
        batch = published.batch
    heading = ("rung", "batch (sequences)", "study (GiB)", "textbook (GiB)", "predicted (GiB)")
    if rows:
        heading = (*heading, "this machine (GiB)", "batch on this machine (sequences)")
    return Table("Peak memory on an A100", heading, cells)


ROOFLINES = (
    "The roofline is the maximum speed by the kernels of a training step. The time of a kernel is the longer of the "
    f'times for its bytes and for its FLOPs at {ACHIEVABLE_FRACTION:.0%} of the datasheet\'s rates. "% of roofline" is '
    'the study\'s speed relative to the roofline of a textbook loop. "expected" is the same percentage of this '
    "project's roofline, which is predicted, not measured. As in the study, one batch in eleven is a validation batch, "
    "which takes a third of a step."
)
"""Note that explains the columns of :func:`rooflines_table`."""


def rooflines_table() -> Table:
    """Build the table of the study's speeds, the rooflines of a textbook loop and this project, and expected speeds."""
    cells: list[tuple[str, ...]] = []
    needs = read_textbook()
    for name, config in study_rungs():
        rung, published = needs[name], STUDY[name].speed
        assert rung.project_seconds, "the record has each of the study's rungs"
        tokens = VALIDATION * config.batch.micro_batch * config.model.context_length
        textbook_roofline, roofline = tokens / rung.seconds, tokens / rung.project_seconds
        fraction = published / textbook_roofline
        speeds = (f"{speed:,.0f}" for speed in (published, textbook_roofline, roofline, fraction * roofline))
        cells.append((name, *speeds, f"{fraction:.0%}"))
    heading = (
        "rung", "study (tokens/s)", "textbook roofline (tokens/s)", "project roofline (tokens/s)",
        "expected (tokens/s)", "% of roofline",
    )  # fmt: skip
    return Table(
        "Speed on an A100: the study, and the rooflines of a textbook loop and of this project", heading, cells
    )


PICTURED_RUNGS = ("baseline", "tensor cores", "mixed precision fp16", "compile", "flash attention", "tied weights")
"""The study's rungs with the largest effects, which the chart shows."""

SOURCE = (
    "Sources: the log that the study published of a notebook with one A100; for the textbook loop and this project, "
    "PyTorch's allocator on a simulated A100 and the roofline of the kernels (make record-textbook). Nothing of this "
    "project was measured on a GPU."
)
"""Text below the chart."""


def draw_predictions() -> Figure:
    """Draw :func:`memory_table` and :func:`rooflines_table` for the rungs with the largest effects."""
    memory_cells, speed_cells = ({row[0]: row for row in table.rows} for table in (memory_table({}), rooflines_table()))

    def column(cells: Mapping[str, Sequence[str]], number: int) -> list[float]:
        return [float(cells[name][number].replace(",", "")) for name in PICTURED_RUNGS]

    study, project = "study", "this project, predicted"
    panels = {
        "GPU memory (GiB)": {
            study: column(memory_cells, 2), "textbook loop, measured": column(memory_cells, 3),
            project: column(memory_cells, 4),
        },
        "tokens/s": {
            study: column(speed_cells, 1), "textbook loop, roofline": column(speed_cells, 2),
            project: column(speed_cells, 4),
        },
    }  # fmt: skip
    figure = charts.grouped_bars(
        "GPT-2 124M: a study, a textbook loop and this project",
        f"NVIDIA A100 with 40 GB · context length 512 · {RECORD['date']}",
        [f"{name}\n{STUDY[name].batch} sequences" for name in PICTURED_RUNGS], panels, SOURCE,
    )  # fmt: skip
    mark_limit(figure.axes[0], STUDY_GPU.memory / GIB, vertical=True, unit="GiB")
    return figure
