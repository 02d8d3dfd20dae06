"""What the study that the suite ``a100`` repeats has published, and what a textbook's loop needs at its rungs.

The study trained GPT-2 124M at a context length of 512 on one A100 with 40 GB in a notebook, about five minutes per
rung, each change first at the batch of the rung before and then with a larger one.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from infra.hardware import A100 as CARD
from train.config import SIXTEEN_BITS, TrainConfig
from train.estimate.memory import CONTEXT
from train.resolve import resolve
from tune.suite.suites import A100, apply

NAME = "study"
"""What ``--compare`` takes for it."""

GIB = 2**30
"""The study's unit of memory."""


@dataclass(frozen=True)
class Published:
    """What the study says of one rung."""

    batch: int
    gib: float
    """GPU memory, called GB there: it is what a textbook's loop takes in GiB, see :func:`textbook`."""
    speed: float
    """Tokens per second."""
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

FIVE_MINUTES = 300.0
"""Seconds."""

_REACHED = 271 / 312
"""Fraction of the datasheet's bf16 peak that a large matrix product reaches on an A100 SXM."""
A100_MATMUL = {"fp32": 19.5e12 * _REACHED, "tf32": 156e12 * _REACHED, "bf16": 312e12 * _REACHED}
"""FLOP/s of a large matrix product on the study's card: in 16 bits as measured, else the same fraction of the peak."""


def textbook() -> dict[str, float]:
    """GiB that a textbook's loop needs on an A100: what torch's allocator reserved, and the CUDA context.

    The record names rungs as the suite does, and is made by ``make record-textbook``. A rung that it lacks, such as one
    of the data's loading, needs what the one before needs.
    """
    record = json.loads(Path(__file__).with_name("textbook.json").read_text(encoding="utf-8"))
    found = {row["rung"]: (row["reserved"] + CONTEXT["cuda"]) / GIB for row in record["rows"]}
    last = 0.0
    for name in STUDY:
        last = found.setdefault(name, last)
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
