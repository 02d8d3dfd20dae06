"""The studies that the suites ``a100``, ``loop`` and ``memory`` repeat, and a ladder beside them.

That of ``a100`` trained GPT-2 124M at a context length of 512 on one A100 with 40 GB in a notebook, about five minutes
per rung, each change first at the batch of the rung before and then with a larger one. Beside it stands what a
textbook's loop needs. The other two say what some changes do to memory and time: :data:`EFFECTS`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from infra.hardware import A100 as CARD
from infra.table import Part
from train.config import SIXTEEN_BITS, TrainConfig
from train.estimate.card import REACHED, planned
from train.estimate.memory import CONTEXT, predict_peak
from train.model_config import format_model
from train.resolve import resolve
from tune import charts
from tune.suite.runs import SAME_BATCH, Measured
from tune.suite.standings import three_digits
from tune.suite.suites import A100, apply

NAME = "study"
"""What ``--compare`` takes for that of the suite."""

GIB = 2**30
"""The study's unit of memory."""


@dataclass(frozen=True)
class Published:
    """What the study says of one rung."""

    batch: int
    gib: float
    """GPU memory, called GB there: it is what a textbook's loop takes in GiB, see :func:`textbook`."""
    speed: float
    """Tokens per second, those of validation among them: see :data:`VALIDATION`."""
    same_batch_gib: float | None = None
    """GPU memory at the batch of the rung before, where the rung raised the batch afterwards."""
    seen: float | None = None
    """Tokens seen after five minutes, where its log is known: less than the speed would make."""


STUDY: Mapping[str, Published] = {
    "baseline": Published(28, 37.0, 16_950, seen=4.6e6),
    "tensor cores": Published(28, 37.0, 40_950),
    "no synchronisation": Published(28, 37.0, 41_015),
    "mixed precision fp16": Published(32, 36.9, 43_700, same_batch_gib=32.4),
    "compile": Published(48, 37.4, 112_200, same_batch_gib=25.4),
    "flash attention": Published(64, 38.9, 132_200, same_batch_gib=29.6),
    "padded vocabulary": Published(64, 38.9, 147_400),
    "tied weights": Published(64, 38.7, 148_700),
    "data-loading workers": Published(64, 38.7, 147_000),
}
"""By the rung's name in the suite ``a100``."""


@dataclass(frozen=True)
class Effect:
    """What a study says of a change: memory, and time of a step, over those without it; None where it says nothing."""

    memory: float | None = None
    time: float | None = None


EFFECTS: Mapping[str, Mapping[str, Effect]] = {
    "loop": {
        "accumulation": Effect(memory=1.11 / 2.5),  # in GB
        "checkpointing": Effect(memory=0.5, time=1.25),
        "asynchronous copies": Effect(time=0.75),
        "compile": Effect(time=0.5),
        "max-autotune": Effect(time=0.3),
    },
    "memory": {"all together": Effect(memory=5 / 15, time=1.0)},
}
"""By suite and rung."""

SAID: Mapping[str, str] = {
    "loop": "The study trained a model of 4 blocks and a width of 256 at a context length of 512, as this suite does "
    "on data with 512 token ids. It measured compile and max-autotune each on top of the changes before.",
    "memory": "The study trained BERT-large on a V100, with accumulation, checkpointing, fp16 and Adafactor or 8-bit "
    "Adam together.",
}
"""How each came to its figures."""

VALIDATION = 11 / (10 + 1 / 3)
"""How much the study's batches of validation add to tokens/s: one in eleven, which takes a third of a step."""

FIVE_MINUTES = 300.0
"""Seconds."""

A100_MATMUL = planned("A100").matmul
"""FLOP/s of a large matrix product on the study's card: in 16 bits as measured, else the same fraction of the peak."""


@dataclass(frozen=True)
class Needed:
    """What a textbook's loop needs of an A100 at one rung; where it has a line of its own, also a step of ours."""

    gib: float
    """What torch's allocator reserved, and the CUDA context."""
    seconds: float
    """Of a step at the least, by the roofline of its kernels."""
    our_seconds: float | None
    """The same of a step of this project."""


def textbook() -> dict[str, Needed]:
    """The record of ``make record-textbook``, by rung as the suite and :func:`memory` name them.

    A rung that it lacks, such as one of the data's loading, needs what the one before needs.
    """
    record = json.loads(Path(__file__).with_name("textbook.json").read_text(encoding="utf-8"))
    found = {
        row["rung"]: Needed((row["reserved"] + CONTEXT["cuda"]) / GIB, row["seconds"], row.get("our_seconds"))
        for row in record["rows"]
    }
    before = "baseline"
    for name in STUDY:
        found.setdefault(name, found[before])
        before = name
    return found


def studied() -> Iterator[tuple[str, TrainConfig]]:
    """The name and the config of each of the study's rungs, at its final batch, resolved for an A100."""
    config = apply(TrainConfig(device="cuda"), A100.base)
    yield "baseline", resolve(config, CARD)
    for rung in A100.rungs:
        if rung.name in STUDY:
            config = apply(config, rung.changes)
            yield rung.name, resolve(config, CARD)


def kinds() -> dict[str, str]:
    """The precision of the matrix products of each of the study's rungs, as infra.doctor names it."""
    return {name: "bf16" if config.precision in SIXTEEN_BITS else config.precision for name, config in studied()}


def deviations(name: str, config: TrainConfig) -> list[str]:
    """What the run ``config`` of the study's rung ``name`` has set otherwise than the study, apart from its sizes."""
    names = ("precision", "attention", "compile", "checkpointing", "loss", "optimizer", "loader_workers")
    ours, theirs = (
        {name.replace("_", " "): str(getattr(each, name)) for name in names}
        | {
            "ablate": " ".join(sorted(each.ablate)) or "nothing",
            "head": "tied" if each.shape.tied else "its own",
            "vocabulary": "padded" if each.shape.padded_vocabulary > each.shape.vocabulary else "not padded",
        }
        for each in (config, dict(studied())[name])
    )
    return [f"{setting} {ours[setting]}, not {theirs[setting]}" for setting in ours if ours[setting] != theirs[setting]]


def effects(suite: str, rows: Sequence[Measured]) -> Part:
    """What the study of the suite ``loop`` or ``memory`` says of its rungs, beside what the ``rows`` measured."""
    here = {row.name: row for row in rows}
    base = here.get("baseline", Measured("")).memory
    lines: list[tuple[str, str, str]] = []
    for name, published in EFFECTS[suite].items():
        row = here.get(name, Measured(name))
        memory = row.memory / base if row.memory and base else None
        time = 1 / row.total.ratio if row.total else None
        lines.append((name, _pair(published.memory, memory, "{:.2f}x"), _pair(published.time, time, "{:.2f}x")))
    return Part("Over the baseline: the study / here", ("rung", "memory", "time of a step"), lines)


def compare(suite: str, rows: Sequence[Measured]) -> tuple[list[Part], list[str]]:
    """The tables of memory and speed beside the study of ``suite``, and what they show."""
    if suite in EFFECTS:
        return [effects(suite, rows)], [SAID[suite]]
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
    tables = [memory(here), rooflines(), Part("Speed: the study / here, - where it was not measured", heading, lines)]
    return tables, [MEMORY, ROOFLINES, *_caveats(configs["baseline"], others), verdict(rows), _last(rows)]


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
            line = rung, f"{size}", *(f"{number:.1f}" for number in (gib, needed[rung].gib, predicted))
            row = here.get(rung, Measured(rung))
            measured = f"{row.memory / GIB:.1f}" if row.memory else "-"
            lines.append((*line, measured, row.batch or "-") if here else line)
        batch = published.batch
    heading = ("rung", "batch", "study", "textbook", "predicted", *(("here", "batch here") if here else ()))
    return Part("Memory in GiB on an A100", heading, lines)


ROOFLINES = (
    "The roofline is what the kernels of a training step allow: each takes as long as its bytes or its FLOPs do at "
    f"{REACHED:.0%} of the datasheet's rates. Reached is the study's share of the textbook's roofline, and expected is "
    "the same share of this project's: predicted, not measured. All of them count one batch of validation in eleven, a "
    "third of a step each, as the study's speeds do."
)
"""What the columns of :func:`rooflines` are."""


def rooflines() -> Part:
    """The study's speeds beside what the kernels of a textbook's step and of ours allow, and what ours should reach."""
    lines: list[tuple[str, ...]] = []
    needed = textbook()
    for name, config in studied():
        found, published = needed[name], STUDY[name].speed
        assert found.our_seconds, "it has a line of its own"
        tokens = VALIDATION * config.micro_batch * config.model.context_length
        allowed, ours = tokens / found.seconds, tokens / found.our_seconds
        reached = published / allowed
        speeds = (f"{speed:,.0f}" for speed in (published, allowed, ours, reached * ours))
        lines.append((name, *speeds, f"{reached:.0%}"))
    heading = ("rung", "study", "textbook", "ours", "expected", "reached")
    return Part("Tokens/s on an A100: the study, the rooflines of a textbook's kernels and of ours", heading, lines)


DRAWN = ("baseline", "tensor cores", "mixed precision fp16", "compile", "flash attention", "tied weights")


def picture() -> Figure:
    """The rungs in which the study changed most: :func:`memory` and :func:`rooflines`, drawn."""
    needs, speeds = ({line[0]: line for line in table.lines} for table in (memory({}), rooflines()))

    def of(lines: Mapping[str, Sequence[str]], column: int) -> list[float]:
        return [float(lines[name][column].replace(",", "")) for name in DRAWN]

    study, ours = "the study", "this project, predicted"
    panels = {
        "GPU memory in GiB": {study: of(needs, 2), "a textbook's loop, run": of(needs, 3), ours: of(needs, 4)},
        "tokens/s": {study: of(speeds, 1), "its textbook's roofline": of(speeds, 2), ours: of(speeds, 4)},
    }
    return charts.grouped([f"{name}\n{STUDY[name].batch} sequences" for name in DRAWN], panels)


def expected(rows: Sequence[Measured]) -> dict[str, float]:
    """The study's tokens/s without its validation, scaled to this machine by the matmul rates of both, by rung."""
    precision = kinds()
    return {
        row.name: STUDY[row.name].speed / VALIDATION * row.matmul_rate / A100_MATMUL[precision[row.name]]
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
        "Expected is the study's speed without its validation, scaled by the matmul rate that infra.doctor measured "
        f"here, up to {fastest:,.3g} TFLOP/s, over that of an A100, {A100_MATMUL['bf16'] / 1e12:,.0f} in 16 bits."
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
