"""What the study that the suite ``a100`` repeats has published, and the memory that is predicted for its rungs.

The study trained GPT-2 124M at a context length of 512 on one A100 with 40 GB in a notebook, about five minutes per
rung, each change first at the batch of the rung before and then with a larger one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from infra.hardware import A100 as CARD
from train.config import SIXTEEN_BITS, WHOLE_GRAPH, TrainConfig
from train.estimate.memory import predict_peak
from train.resolve import resolve
from tune.suite.suites import A100, apply

NAME = "study"
"""What ``--compare`` takes for it."""


@dataclass(frozen=True)
class Published:
    """What the study says of one rung."""

    batch: int
    gb: float
    """GPU memory in GB, of which it does not say how it was measured."""
    speed: float
    """Tokens per second."""
    same_batch_gb: float | None = None
    """GPU memory at the batch of the rung before, where the rung raised the batch afterwards."""
    seen: float | None = None
    """Tokens seen after five minutes, where its log is known: less than the speed would make."""


STUDY: Mapping[str, Published] = {
    "baseline": Published(28, 37.0, 16_950, seen=4.6e6),
    "tensor cores": Published(28, 37.0, 40_950),
    "no synchronisation": Published(28, 37.0, 41_015),
    "mixed precision fp16": Published(32, 36.9, 43_700, same_batch_gb=32.4),
    "compile": Published(48, 37.4, 112_200, same_batch_gb=25.4),
    "flash attention": Published(64, 38.9, 132_200, same_batch_gb=29.6),
    "padded vocabulary": Published(64, 38.9, 147_400),
    "tied weights": Published(64, 38.7, 148_700),
    "data-loading workers": Published(64, 38.7, 147_000),
}
"""By the rung's name in the suite ``a100``."""

FIVE_MINUTES = 300.0
"""Seconds."""

_REACHED = 271 / 312
"""Fraction of the datasheet's bf16 peak that a large matrix product reaches on an A100 SXM."""
A100_MATMUL = {"fp32": 19.5e12 * _REACHED, "tf32": 156e12 * _REACHED, "bf16": 312e12 * _REACHED}
"""FLOP/s of a large matrix product on the study's card: in 16 bits as measured, else the same fraction of the peak."""


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
    published = dict(studied())[name]
    ours, theirs = _settings(config), _settings(published)
    return [f"{setting} {ours[setting]}, not {theirs[setting]}" for setting in ours if ours[setting] != theirs[setting]]


def _settings(config: TrainConfig) -> dict[str, str]:
    names = ("precision", "attention", "compile", "checkpointing", "loss", "optimizer", "loader_workers")
    model = config.model
    return {
        **{name.replace("_", " "): str(getattr(config, name)) for name in names},
        "ablate": " ".join(sorted(config.ablate)) or "nothing",
        "head": "tied" if model.tied else "its own",
        "vocabulary": "padded" if model.padded_vocabulary > model.vocabulary else "not padded",
    }


HEADING = ("rung", "batch", "study", "predicted", "dropout", "GELU", "loss", "sum", "left")
"""The headings of :func:`memory_rows`."""

EXPLANATION = (
    "Predicted is the peak of this project's own rung, as --suite a100 runs it. The study's code may differ in three "
    "habits of textbook loops, and the next columns say what each would add by the same formulas: a dropout of 0.1; a "
    "GELU that is written out, which eager execution keeps term by term; and a loss that is computed outside the "
    "compiled model, with logits in fp32. What is then left is what formulas cannot predict, such as the segments that "
    "torch's allocator keeps, or memory that the study did not count."
)


def memory_rows() -> list[tuple[str, ...]]:
    """The study's memory beside the prediction, in GB, and what may explain the difference.

    A rung that raised the batch has two rows, the first at the batch of the rung before.
    """
    rows: list[tuple[str, ...]] = []
    batch = STUDY["baseline"].batch
    for name, config in studied():
        published = STUDY[name]
        if published.same_batch_gb:
            same = replace(config, micro_batch=batch, global_batch=batch)
            rows.append(_memory_row(name, same, published.same_batch_gb))
        rows.append(_memory_row(name, config, published.gb))
        batch = published.batch
    return rows


def _memory_row(name: str, config: TrainConfig, gb: float) -> tuple[str, ...]:
    predicted = predict_peak(config).total
    habits = (dropout_bytes(config), gelu_bytes(config), loss_bytes(config))
    expected = predicted + sum(habits)
    shown = [f"{size / 1e9:.1f}" for size in (predicted, *habits, expected)]
    return (name, str(config.micro_batch), f"{gb:.1f}", *shown, f"{gb - expected / 1e9:+.1f}")


def dropout_bytes(config: TrainConfig) -> int:
    """Bytes that a dropout of 0.1 would add to the peak."""
    dropped = replace(config, model=replace(config.model, dropout=0.1))
    return predict_peak(dropped).total - predict_peak(config).total


def gelu_bytes(config: TrainConfig) -> int:
    """Bytes that eager execution keeps of ``0.5 x (1 + tanh(c (x + 0.044715 x^3)))`` beyond what ``F.gelu`` keeps.

    They are the tanh, the sum with one and ``0.5 x``; autocast computes the power in fp32, of a copy of ``x``.
    """
    if config.compile != "off":
        return 0
    each = 4 + 4 + 2 + 4 if config.precision in SIXTEEN_BITS else 4 + 4 + 4
    model = config.model
    return config.micro_batch * model.context_length * model.layers * 4 * model.width * each


def loss_bytes(config: TrainConfig) -> int:
    """Bytes that a loss in eager execution after a compiled model would add: fp32 logits, log-softmax and gradient."""
    if config.compile not in WHOLE_GRAPH:
        return 0
    inside = 2 if config.precision in SIXTEEN_BITS else 4
    return config.micro_batch * config.model.context_length * config.model.padded_vocabulary * (12 - inside)
