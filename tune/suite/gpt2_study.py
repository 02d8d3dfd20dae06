"""Comparison of a ladder with the study of GPT-2 on an A100, which the suite ``a100`` repeats."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from infra.cli.table import Table
from train.config import HALF_PRECISIONS, ResolvedConfig
from train.estimate.gpu_rates import load_gpu_rates
from train.model_config import ModelSpec
from tune.suite import charts
from tune.suite.published import (
    LOGGED_LOSS_BATCH,
    LOGGED_LOSS_TOKENS,
    LOGGED_LOSSES,
    STUDY,
    VALIDATION,
)
from tune.suite.results import three_digits
from tune.suite.runs import RungResult
from tune.suite.textbook import GIB, MEMORY, ROOFLINES, memory_table, rooflines_table, study_rungs

COUNT_SECONDS = 300.0
"""Time after which the study counted tokens, in seconds."""

A100_MATMUL = load_gpu_rates("A100").matmul
"""FLOP/s of a large matrix product on the study's GPU by precision: measured in 16 bits, else scaled by the peak."""


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


def compare(rows: Sequence[RungResult]) -> tuple[list[Table], list[str]]:
    """Compare the ``rows`` with the study.

    Returns: (tables, notes below them).
    """
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
            _losses(row),
            f"{speed / scaled[name]:.0%}" if speed and name in scaled else "-",
        ))  # fmt: skip
        previous_speed, previous_total = published.speed, total
    heading = (
        "rung", "tokens/s", "vs previous", "vs baseline", "tokens in 5 min (millions)",
        "loss on this machine (training / validation)", "% of expected",
    )  # fmt: skip
    title = 'Speed: study / this machine ("-": not measured)'
    tables = [memory_table(by_name), rooflines_table(), Table(title, heading, cells)]
    baseline = configs["baseline"]
    caveats = _caveats(baseline.model, baseline.batch.micro_batch, deviating)
    return tables, [MEMORY, ROOFLINES, *caveats, verdict(rows), _total_speedup(rows)]


def _losses(row: RungResult) -> str:
    losses = (row.loss, row.val_loss)
    return " / ".join("-" if loss is None else f"{loss:.3f}" for loss in losses) if any(losses) else "-"


def draw(rows: Sequence[RungResult], conditions: str) -> Figure:
    """Draw memory and speed of the study and of the ``rows``, relative to each baseline if the baselines differ.

    ``conditions`` describe where the rows were measured.
    """
    runs = {row.name: row for row in rows if row.name in STUDY and row.speed}
    names, base, study_base = [*runs], runs["baseline"], STUDY["baseline"]
    memory = [run.memory or 0 for run in runs.values()]
    panels: dict[str, dict[str, list[float | None]]]
    if base.config and differs_from_study(base.config.model, base.config.batch.micro_batch):
        panels = {
            "peak memory (ratio to the baseline)": {
                "study": [STUDY[name].gib / study_base.gib for name in names],
                "this machine": [size / memory[0] for size in memory],
            },
            "speed (ratio to the baseline)": {
                "study": [STUDY[name].speed / study_base.speed for name in names],
                "this machine": [_ratio(run) for run in runs.values()],
            },
        }
    else:
        panels = {
            "GPU memory (GiB)": {
                "study": [STUDY[name].gib for name in names], "this machine": [size / GIB for size in memory]
            },
            "tokens/s": {
                "study": [STUDY[name].speed for name in names],
                "this machine": [run.speed and run.speed.middle for run in runs.values()],
            },
        }  # fmt: skip
    title = "GPT-2 124M: the published study and this machine"
    return charts.grouped_bars(title, f"study: NVIDIA A100 with 40 GB · this machine: {conditions}", names, panels, LOG)


LOG = "Source of the study: the log that it published of a notebook with one A100."
"""Text below the chart of a ladder."""


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
    training_loss, validation_loss = LOGGED_LOSSES
    notes.append(
        f"Of the study's losses one is known: {training_loss} / {validation_loss} nats/token after "
        f"{LOGGED_LOSS_TOKENS:,} tokens at a batch of {LOGGED_LOSS_BATCH}. This machine's training loss is after equal "
        "tokens in all rungs, its validation loss at the end of the rung."
    )
    if differs_from_study(model, micro_batch):
        notes.append(
            f"The baseline of this ladder is {model.text} at batch {micro_batch}, but the study's baseline is "
            f"{_study_baseline().model.text} at batch {_study_baseline().batch.micro_batch}. Compare the ratios, not "
            "memory and speed."
        )
    return notes


def differs_from_study(model: ModelSpec, micro_batch: int) -> bool:
    """Return whether a baseline of this model and micro-batch does other work than the study's."""
    return (model, micro_batch) != (_study_baseline().model, _study_baseline().batch.micro_batch)


def _study_baseline() -> ResolvedConfig:
    return next(study_rungs())[1]


def _ratio(row: RungResult) -> float | None:
    """Return the speed relative to the baseline, measured by the controls around the rung."""
    return 1.0 if row.name == "baseline" else row.total and row.total.ratio


def _study_vs_ladder(study_value: object, value: object, template: str) -> str:
    return " / ".join("-" if number is None else template.format(number) for number in (study_value, value))
