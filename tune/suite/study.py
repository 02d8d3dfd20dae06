"""The published studies that the suites ``a100``, ``loop`` and ``memory`` repeat, and their comparison with a ladder.

The study of ``a100`` trained GPT-2 124M at a context length of 512 on one A100 with 40 GB in a notebook, for about five
minutes per rung. It measured each change at the batch of the previous rung, and then with a larger batch. It is also
compared with the memory and roofline of a textbook loop. The two other studies published the effects of some changes,
which are in :data:`EFFECTS`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from infra.charts import mark_limit
from infra.cli.table import Table
from infra.device.hardware import A100 as STUDY_GPU
from train.config import HALF_PRECISIONS, ResolvedConfig, TrainConfig
from train.estimate.breakdown import CONTEXT
from train.estimate.gpu_rates import ACHIEVABLE_FRACTION, load_gpu_rates
from train.estimate.memory import predict_peak
from train.model_config import ModelSpec
from train.resolved import resolve
from tune.suite import charts
from tune.suite.results import three_digits
from tune.suite.runs import SAME_BATCH, RungResult
from tune.suite.suites import A100, apply_changes

NAME = "study"
"""Value of ``--compare`` that selects the study of the suite."""

MODEL = "GPT-2"
"""Architecture of the study's model."""

GIB = 2**30
"""The study's unit of memory."""


@dataclass(frozen=True)
class Published:
    """The study's results of one rung."""

    batch: int
    """Micro-batch in sequences."""
    gib: float
    """GPU memory in GiB. The study calls the unit GB, but a textbook loop needs this many GiB: :func:`textbook`."""
    speed: float
    """Speed in tokens/s, including the tokens of validation: see :data:`VALIDATION`."""
    same_batch_gib: float | None = None
    """GPU memory in GiB at the batch of the previous rung; None unless the rung has a larger batch."""
    logged_tokens: float | None = None
    """Tokens processed in five minutes by the study's log, which are fewer than its speed implies; None if unknown."""


STUDY: Mapping[str, Published] = {
    "baseline": Published(28, 37.0, 16_950, logged_tokens=4.6e6),
    "tensor cores": Published(28, 37.0, 40_950),
    "no synchronization": Published(28, 37.0, 41_015),
    "mixed precision fp16": Published(32, 36.9, 43_700, same_batch_gib=32.4),
    "compile": Published(48, 37.4, 112_200, same_batch_gib=25.4),
    "flash attention": Published(64, 38.9, 132_200, same_batch_gib=29.6),
    "padded vocabulary": Published(64, 38.9, 147_400),
    "tied weights": Published(64, 38.7, 148_700),
    "data-loading workers": Published(64, 38.7, 147_000),
}
"""The study's results by the rung's name in the suite ``a100``."""


@dataclass(frozen=True)
class Effect:
    """Effect of a change on memory and step time, as ratios to the values without the change."""

    memory: float | None = None
    """Ratio of memory; None if it was not published."""
    time: float | None = None
    """Ratio of step time; None if it was not published."""


EFFECTS: Mapping[str, Mapping[str, Effect]] = {
    "loop": {
        "accumulation": Effect(memory=1.11 / 2.5),  # The study published the memory in GB.
        "checkpointing": Effect(memory=0.5, time=1.25),
        "asynchronous copies": Effect(time=0.75),
        "compile": Effect(time=0.5),
        "max-autotune": Effect(time=0.3),
    },
    "memory": {"all together": Effect(memory=5 / 15, time=1.0)},
}
"""Published effects by suite and rung."""

STUDY_NOTES: Mapping[str, str] = {
    "loop": "The study trained a model with 4 blocks and a width of 256 at a context length of 512, as this suite does "
    "on data with 512 token ids. It measured compile and max-autotune together with the previous changes.",
    "memory": "The study trained BERT-large on a V100, with accumulation, checkpointing, fp16 and Adafactor or 8-bit "
    "Adam together.",
}
"""Setup of each study, as a note below its table."""

VALIDATION = 11 / (10 + 1 / 3)
"""Factor by which validation increases the study's tokens/s: one batch in eleven, which takes a third of a step."""

COUNT_SECONDS = 300.0
"""Time after which the study counted tokens, in seconds."""

A100_MATMUL = load_gpu_rates("A100").matmul
"""FLOP/s of a large matrix product on the study's GPU by precision: measured in 16 bits, else scaled by the peak."""


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


def matmul_precisions() -> dict[str, str]:
    """Return the precision of the matrix products in each of the study's rungs, by its name in infra.doctor."""
    return {
        name: "bf16" if config.execution.precision in HALF_PRECISIONS else config.execution.precision
        for name, config in study_rungs()
    }


def list_deviations(rung: str, settings: Mapping[str, Any]) -> list[str]:
    """List the settings, except sizes, in which a run of the study's ``rung`` differs from the study."""
    names = ("precision", "attention", "compile", "checkpointing", "loss", "optimizer", "loader_threads")
    texts, study_texts = (
        {name.replace("_", " "): str(values[name]) for name in names}
        | {"ablate": " ".join(sorted(values["ablate"])) or "nothing"}
        | values["model"].variants
        for values in (settings, dict(study_rungs())[rung].flat())
    )
    return [f"{name} {text}, not {study_texts[name]}" for name, text in texts.items() if text != study_texts[name]]


def effects_table(suite: str, rows: Sequence[RungResult]) -> Table:
    """Build the table of the published effects of the suite ``loop`` or ``memory``, and of the measured effects."""
    by_name = {row.name: row for row in rows}
    base = by_name.get("baseline", RungResult("")).memory
    cells: list[tuple[str, str, str]] = []
    for name, published in EFFECTS[suite].items():
        row = by_name.get(name, RungResult(name))
        memory = row.memory / base if row.memory and base else None
        time = 1 / row.total.ratio if row.total else None
        memory_cell, time_cell = (
            _study_vs_ladder(published.memory, memory, "x{:.2f}"), _study_vs_ladder(published.time, time, "x{:.2f}")
        )  # fmt: skip
        cells.append((name, memory_cell, time_cell))
    title = 'Effect vs baseline: study / this machine ("-": not measured)'
    return Table(title, ("rung", "peak memory (ratio)", "step time (ratio)"), cells)


def compare(suite: str, rows: Sequence[RungResult]) -> tuple[list[Table], list[str]]:
    """Compare the ``rows`` with the study of ``suite``.

    Returns: (tables, notes below them).
    """
    if suite in EFFECTS:
        return [effects_table(suite, rows)], [STUDY_NOTES[suite]]
    configs = {row.name: row.config for row in rows if row.config}
    deviating = {
        name: settings
        for name in STUDY
        if name in configs and (settings := list_deviations(name, configs[name].flat()))
    }
    # Without a matmul rate, no speed is expected of a rung that deviates from the study.
    rows = [replace(row, matmul_rate=None) if row.name in deviating else row for row in rows]
    by_name = {row.name: row for row in rows}
    baseline_speed = STUDY["baseline"].speed
    cells: list[tuple[str, ...]] = []
    previous_speed = previous_total = None
    scaled = expected_speeds(rows)
    for name, published in STUDY.items():
        row = by_name.get(name, RungResult(name))
        speed, total = row.speed and row.speed.middle, _ratio(row)
        step = total / previous_total if total and previous_total else None
        tokens = published.logged_tokens or published.speed * COUNT_SECONDS, speed and speed * COUNT_SECONDS
        study_tokens, row_tokens = (count and three_digits(count / 1e6) for count in tokens)
        cells.append((
            name,
            _study_vs_ladder(published.speed, speed, "{:,.0f}"),
            _study_vs_ladder(published.speed / previous_speed, step, "x{:.2f}") if previous_speed else "",
            _study_vs_ladder(published.speed / baseline_speed, total, "x{:.2f}"),
            _study_vs_ladder(study_tokens, row_tokens, "{}"),
            f"{speed / scaled[name]:.0%}" if speed and name in scaled else "-",
        ))  # fmt: skip
        previous_speed, previous_total = published.speed, total
    heading = ("rung", "tokens/s", "vs previous", "vs baseline", "tokens in 5 min (millions)", "% of expected")
    title = 'Speed: study / this machine ("-": not measured)'
    tables = [memory_table(by_name), rooflines_table(), Table(title, heading, cells)]
    baseline = configs["baseline"]
    caveats = _caveats(baseline.model, baseline.batch.micro_batch, deviating)
    return tables, [MEMORY, ROOFLINES, *caveats, verdict(rows), _total_speedup(rows)]


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


def draw_study() -> Figure:
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


def expected_speeds(rows: Sequence[RungResult]) -> dict[str, float]:
    """Return the expected tokens/s by rung: the study's speeds without validation, scaled by the ratio of matmul
    rates."""
    precision = matmul_precisions()
    return {
        row.name: STUDY[row.name].speed / VALIDATION * row.matmul_rate / A100_MATMUL[precision[row.name]]
        for row in rows
        if row.name in STUDY and row.matmul_rate
    }


def verdict(rows: Sequence[RungResult]) -> str:
    """Return sentences that explain the expected speed and name the first rung at which this machine is slower."""
    scaled = expected_speeds(rows)
    if not scaled:
        return (
            "The expected speed is unknown without this machine's matmul rate. Run 'python -m infra.doctor' before the "
            "ladder."
        )
    fastest = max(row.matmul_rate or 0.0 for row in rows) / 1e12
    explanation = (
        "The expected speed is the study's without validation, scaled by the matmul rate that infra.doctor measured on "
        f"this machine (up to {fastest:,.3g} TFLOP/s) relative to an A100's ({A100_MATMUL['bf16'] / 1e12:,.0f} TFLOP/s "
        "in 16 bits)."
    )
    for row in rows:
        if row.speed and row.speed.high < scaled.get(row.name, 0.0):
            percent = f"{row.speed.middle / scaled[row.name]:.0%}"
            return f"{explanation} The first rung below it is {row.name!r}, with {percent} of the expected speed."
    return f"{explanation} No rung is significantly below it."


def _total_speedup(rows: Sequence[RungResult]) -> str:
    published = STUDY["data-loading workers"].speed / STUDY["baseline"].speed
    texts = [f"; on this machine, {row.name!r} reaches x{row.total.ratio:.1f}" for row in rows if row.total]
    return f"The study's last rung reaches x{published:.1f} of its baseline's speed{''.join(texts[-1:])}."


def _caveats(model: ModelSpec, micro_batch: int, deviating: Mapping[str, list[str]]) -> list[str]:
    notes = [
        "Tokens in 5 min are tokens/s x 300 s, except for the study's baseline, whose log has fewer tokens than its "
        "speed implies."
    ]
    if deviating:
        rungs = "; ".join(f"{name} ({', '.join(settings)})" for name, settings in deviating.items())
        notes.append(f"These rungs differ from the study and have no expected speed: {rungs}.")
    _, study_baseline = next(study_rungs())
    settings, study_settings = (model, micro_batch), (study_baseline.model, study_baseline.batch.micro_batch)
    if settings != study_settings:
        text, study_text = (f"{m.text} at batch {size}" for m, size in (settings, study_settings))
        notes.append(
            f"The baseline of this ladder is {text}, but the study's baseline is {study_text}. Compare the ratios, not "
            "memory and speed."
        )
    return notes


def _ratio(row: RungResult) -> float | None:
    """Return the speed relative to the baseline, measured by the controls around the rung."""
    return 1.0 if row.name == "baseline" else row.total and row.total.ratio


def _study_vs_ladder(study_value: object, value: object, template: str) -> str:
    return " / ".join("-" if number is None else template.format(number) for number in (study_value, value))
