"""A ladder beside the study that the suite ``a100`` repeats: each rung's figures, and where this machine falls behind.

In: the rows of a ladder. Out: a table of memory, beside that of a textbook's loop; one of speed, whose pairs are the
study's figure and the one measured here; and sentences.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from infra.table import Part
from train.config import TrainConfig
from train.estimate.memory import predict_peak
from train.model_config import format_model
from tune.suite.published import A100_MATMUL, FIVE_MINUTES, GIB, STUDY, deviations, kinds, studied, textbook
from tune.suite.runs import SAME_BATCH, Measured
from tune.suite.standings import three_digits


def compare(rows: Sequence[Measured]) -> tuple[list[Part], list[str]]:
    """The tables of memory and speed, and what they show."""
    configs = {row.name: row.config for row in rows if row.config}
    others = {name: found for name in STUDY if name in configs and (found := deviations(name, configs[name]))}
    rows = [replace(row, matmul_rate=None) if row.name in others else row for row in rows]  # with nothing to expect
    here = {row.name: row for row in rows}
    first = STUDY["baseline"].speed
    lines: list[tuple[str, ...]] = []
    study_before = row_before = None
    scaled = expected(rows)
    for name, published in STUDY.items():
        row = here.get(name, Measured(name))
        speed, total = row.speed and row.speed.middle, _ratio(row)
        step = total / row_before if total and row_before else None
        tokens = published.seen or published.speed * FIVE_MINUTES, speed and speed * FIVE_MINUTES
        reached, here_reached = (each and three_digits(each / 1e6) for each in tokens)
        lines.append((
            name,
            _pair(published.speed, speed, "{:,.0f}"),
            _pair(published.speed / study_before, step, "{:.2f}x") if study_before else "",
            _pair(published.speed / first, total, "{:.2f}x"),
            _pair(reached, here_reached, "{}"),
            f"{speed / scaled[name]:.0%}" if speed and name in scaled else "-",
        ))  # fmt: skip
        study_before, row_before = published.speed, total
    heading = ("rung", "tokens/s", "step", "total", "M tokens in 5 min", "of expected")
    tables = [memory(here), Part("Speed: the study / here, - where it was not measured", heading, lines)]
    return tables, [MEMORY, *_caveats(configs["baseline"], others), verdict(rows), _last(rows)]


MEMORY = (
    "Textbook is a loop as textbooks write it, with dropout, with GELU and normalisation written out, and with the "
    "loss outside the compiled model: it was run at each rung, and what torch's allocator reserved is counted together "
    "with the CUDA context. Predicted is this project's own rung at the study's batch."
)
"""What the columns of :func:`memory` are."""


def memory(here: Mapping[str, Measured]) -> Part:
    """The study's memory beside that of a textbook's loop, the prediction, and what the rows ``here`` measured, if any.

    A rung whose batch the study raised has a line before, at the batch of the rung before it.
    """
    lines: list[tuple[str, ...]] = []
    needed, batch = textbook(), 0
    for name, config in studied():
        published = STUDY[name]
        for rung, size, gib in (
            (name + SAME_BATCH, batch, published.same_batch_gib), (name, published.batch, published.gib),
        ):  # fmt: skip
            if gib is None:
                continue
            predicted = predict_peak(replace(config, micro_batch=size, global_batch=size)).total / GIB
            line = rung, f"{size}", *(f"{number:.1f}" for number in (gib, needed[rung], predicted))
            row = here.get(rung, Measured(rung))
            measured = f"{row.memory / GIB:.1f}" if row.memory else "-"
            lines.append((*line, measured, row.batch or "-") if here else line)
        batch = published.batch
    heading = ("rung", "batch", "study", "textbook", "predicted", *(("here", "batch here") if here else ()))
    return Part("Memory in GiB on an A100", heading, lines)


def expected(rows: Sequence[Measured]) -> dict[str, float]:
    """The study's tokens/s scaled to this machine by the matmul rates of both, by rung, where ours is known."""
    precision = kinds()
    return {
        row.name: STUDY[row.name].speed * row.matmul_rate / A100_MATMUL[precision[row.name]]
        for row in rows
        if row.name in STUDY and row.matmul_rate
    }


def verdict(rows: Sequence[Measured]) -> str:
    """The rung at which the machine of ``rows`` falls behind the study's, scaled by the measured matmul rate."""
    scaled = expected(rows)
    if not scaled:
        return (
            "How much of the study's speed this machine should reach is not known without its matmul rate: run "
            "'python -m infra.doctor' before the ladder."
        )
    fastest = max(row.matmul_rate or 0.0 for row in rows) / 1e12
    base = (
        "Expected is the study's speed scaled by the matmul rate that infra.doctor measured here, up to "
        f"{fastest:,.3g} TFLOP/s, over that of an A100, {A100_MATMUL['bf16'] / 1e12:,.0f} in 16 bits."
    )
    for row in rows:
        if row.speed and row.speed.high < scaled.get(row.name, 0.0):
            share = row.speed.middle / scaled[row.name]
            return f"{base} This machine falls behind first at {row.name!r}, with {share:.0%} of the expected speed."
    return f"{base} This machine falls behind at no rung."


def _last(rows: Sequence[Measured]) -> str:
    published = STUDY["data-loading workers"].speed / STUDY["baseline"].speed
    here = [f"; here {row.name!r} is {row.total.ratio:.1f} times" for row in rows if row.total]
    return f"The study's last rung is {published:.1f} times its first{''.join(here[-1:])}."


def _caveats(baseline: TrainConfig, others: Mapping[str, list[str]]) -> list[str]:
    said = [
        "Tokens in 5 min are tokens/s times 300 s; those of the study's baseline are from its log, and fewer than its "
        "speed would make."
    ]
    if others:
        each = "; ".join(f"{name} ({', '.join(found)})" for name, found in others.items())
        said.append(f"Not as in the study, and so without an expected speed: {each}.")
    _, first = next(studied())
    if (baseline.model, baseline.micro_batch) != (first.model, first.micro_batch):
        ours, theirs = (f"{format_model(each.model)} at a batch of {each.micro_batch}" for each in (baseline, first))
        said.append(f"The baseline here is {ours}, the study's {theirs}: compare the ratios, not memory and speed.")
    return said


def _ratio(row: Measured) -> float | None:
    """Speed over the baseline's, relative to the controls around the rung."""
    return 1.0 if row.name == "baseline" else row.total and row.total.ratio


def _pair(study: object, here: object, template: str) -> str:
    return " / ".join("-" if value is None else template.format(value) for value in (study, here))
