"""The ladders: readable lists of config changes, each of which becomes one measured run.

In: a suite's name, and the config to start from. Out: rungs. A climbing suite keeps each rung's
changes for those above it; the others change the baseline one thing at a time. The sizes of the studies
are theirs: one GPU with 40 GB.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from infra.errors import UserError
from infra.schema import to_json
from train.config import TrainConfig, config_from_json
from train.model_config import ModelConfig, parse_model

Changes = Mapping[str, Any]
"""Fields of TrainConfig and, after ``model.``, of ModelConfig. Two more names stand for several fields:
``batch`` is micro-batch and global batch in one, ``vocabulary_multiple`` pads the vocabulary to a multiple."""


@dataclass(frozen=True)
class Rung:
    """One change and its name. ``new_mathematics`` labels a rung whose loss curve is not that of the rung before.

    A rung with another global batch is labelled when it is run.
    """

    name: str
    changes: Changes = field(default_factory=dict)
    new_mathematics: bool = False


@dataclass(frozen=True)
class Suite:
    """A list of rungs over a baseline, which is also the control that is run again between rungs."""

    name: str
    title: str
    base: Changes
    rungs: tuple[Rung, ...]
    climbs: bool = False
    """Each rung keeps the changes of those before it."""
    steps_timed: int = 1
    """Steps whose time the closing table shows: as many as the study that the suite repeats."""


_NAIVE: Changes = {
    "precision": "fp32", "attention": "manual", "optimizer": "adamw", "compile": "off", "checkpointing": "none",
    "loss": "plain", "loss_chunks": 1, "loader_workers": 0, "vocabulary_multiple": 1, "schedule": "constant",
}  # fmt: skip

A100 = Suite(
    "a100",
    "GPT-2 124M on one GPU, from the textbook loop upwards, each rung keeping the ones before",
    _NAIVE | {"model": "gpt2-124m", "model.tied": False, "batch": 28, "naive": ("sync", "copy", "collect")},
    (
        Rung("tensor cores", {"precision": "tf32"}),
        Rung("no synchronisation", {"naive": ("copy", "collect")}),
        Rung("mixed precision fp16", {"precision": "fp16", "batch": 32}, new_mathematics=True),
        Rung("compile", {"compile": "whole", "batch": 48}),
        Rung("flash attention", {"attention": "sdpa", "batch": 64}),
        Rung("padded vocabulary", {"vocabulary_multiple": 64}, new_mathematics=True),
        Rung("tied weights", {"model.tied": True}, new_mathematics=True),
        Rung("data-loading workers", {"loader_workers": 1}),
        Rung("bf16 without scaler", {"precision": "bf16"}, new_mathematics=True),
        Rung("bf16 activations", {"precision": "bf16-activations"}, new_mathematics=True),
        Rung("fused AdamW", {"optimizer": "adamw-fused"}),
        Rung("the GPU's attention", {"attention": "auto"}),
        Rung("frozen collector", {"naive": ("copy",)}),
        Rung("prefetched copies", {"naive": ()}),
        Rung("max-autotune", {"compile": "max-autotune"}),
    ),
    climbs=True,
)

LOOP = Suite(
    "loop",
    "The training loop as a black box: what each habit costs on a small model (two batches are two steps)",
    _NAIVE | {"model": "small", "batch": 32, "naive": ("sync", "zero", "copy", "collect", "pages")},
    (
        Rung("accumulation", {"micro_batch": 8}),
        Rung("gradients set to none", {"naive": ("sync", "copy", "collect", "pages")}),
        Rung("mixed precision bf16", {"precision": "bf16"}, new_mathematics=True),
        Rung("tensor cores", {"precision": "tf32"}),
        Rung("checkpointing", {"checkpointing": "full"}),
        Rung("no synchronisation", {"naive": ("zero", "copy", "collect", "pages")}),
        Rung("asynchronous copies", {"naive": ("sync", "zero", "collect", "pages")}),
        Rung("large pages", {"naive": ("sync", "zero", "copy", "collect")}),
        Rung("compile", {"compile": "whole"}),
        Rung("max-autotune", {"compile": "max-autotune"}),
        Rung(
            "all together",
            {
                "naive": (), "precision": "bf16", "attention": "auto", "optimizer": "adamw-fused",
                "compile": "max-autotune",
            },
            new_mathematics=True,
        ),
    ),
    steps_timed=2,
)  # fmt: skip

MEMORY = Suite(
    "memory",
    "What saves memory, and what it costs in speed",
    _NAIVE | {"model": "gpt2-124m", "attention": "sdpa", "optimizer": "adamw-fused", "batch": 16},
    (
        Rung("accumulation", {"micro_batch": 4}),
        Rung("checkpointing", {"checkpointing": "full"}),
        Rung("selective checkpointing", {"checkpointing": "selective"}),
        Rung("fp16", {"precision": "fp16"}, new_mathematics=True),
        Rung("bf16", {"precision": "bf16"}, new_mathematics=True),
        Rung("bf16 activations", {"precision": "bf16-activations"}, new_mathematics=True),
        Rung("TF32", {"precision": "tf32"}),
        Rung("Adafactor", {"optimizer": "adafactor"}, new_mathematics=True),
        Rung("8-bit AdamW", {"optimizer": "adamw-8bit"}, new_mathematics=True),
        Rung("bf16 AdamW", {"optimizer": "adamw-bf16", "precision": "bf16-activations"}, new_mathematics=True),
        Rung("chunked loss", {"loss_chunks": 8}),
        Rung("compile", {"compile": "whole"}),
        Rung(
            "all together",
            {
                "micro_batch": 4, "checkpointing": "full", "precision": "bf16-activations", "loss_chunks": 8,
                "optimizer": "adamw-bf16", "compile": "blocks",
            },
            new_mathematics=True,
        ),
    ),
)  # fmt: skip

SIZES = Suite(
    "sizes",
    "Sizes that fill tiles and waves, and sizes that do not",
    {"model": "gpt2-124m", "batch": 32, "vocabulary_multiple": 64, "schedule": "constant"},
    (
        Rung("vocabulary not padded", {"vocabulary_multiple": 1}, new_mathematics=True),
        Rung("vocabulary to 50,432", {"vocabulary_multiple": 256}, new_mathematics=True),
        Rung("6 heads", {"model.heads": 6}, new_mathematics=True),
        Rung("16 heads", {"model.heads": 16}, new_mathematics=True),
        Rung("24 heads", {"model.heads": 24}, new_mathematics=True),
        *(Rung(f"batch {size}", {"batch": size}) for size in (7, 8, 9, 31, 33, 63, 64, 65)),
    ),
)

AA = Suite(
    "aa",
    "A/A: the same run again and again, to see how often the verdict is a false alarm here",
    {"model": "gpt2-124m", "batch": 16, "schedule": "constant"},
    tuple(Rung(f"again {number}") for number in range(1, 11)),
)

SUITES = {suite.name: suite for suite in (A100, LOOP, MEMORY, SIZES, AA)}


def searched(best: TrainConfig) -> Rung:
    """A rung with the batch and the execution that a search found the fastest."""
    names = (
        "global_batch", "micro_batch", "precision", "attention", "compile", "checkpointing", "loss", "loss_chunks",
        "optimizer", "loader_workers",
    )  # fmt: skip
    return Rung("searched batch", {name: getattr(best, name) for name in names}, new_mathematics=True)


def nearest(text: str, known: Iterable[str]) -> str:
    """The end of a sentence that offers the names most like ``text``, or all of them."""
    known = list(known)
    close = difflib.get_close_matches(text.lower(), known, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else f"; there are {', '.join(known)}."


def choose(suite: Suite, names: Iterable[str]) -> Suite:
    """``suite`` with only the rungs called ``names``, in the suite's order. Raises ``UserError``."""
    known = {rung.name: rung for rung in suite.rungs}
    names = list(names)
    for name in names:
        if name not in known:
            raise UserError(f"--rungs {name!r} is not in the suite {suite.name}{nearest(name, known)}")
    return replace(suite, rungs=tuple(rung for rung in suite.rungs if rung.name in names))


def short_form(suite: Suite) -> Suite:
    """``suite`` for a CPU: the tiny model and batches an eighth the size, in the baseline and in every rung."""

    def shorten(changes: Changes) -> Changes:
        sizes = ("batch", "micro_batch", "global_batch")
        small = {
            name: -(-value // 8) if name in sizes and isinstance(value, int) else value
            for name, value in changes.items()
        }
        return small | ({"model": "tiny"} if "model" in small else {})

    start = {"model": "tiny", "micro_batch": TrainConfig.micro_batch, "global_batch": TrainConfig.global_batch}
    rungs = tuple(replace(rung, changes=shorten(rung.changes)) for rung in suite.rungs)
    return replace(suite, base=shorten(start | dict(suite.base)), rungs=rungs)


def apply(config: TrainConfig, changes: Changes, source: str = "the suite") -> TrainConfig:
    """``config`` with the ``changes`` that ``source`` makes.

    Raises ``UserError`` for an unknown field and for what contradicts itself.
    """
    known = {f.name for f in fields(TrainConfig)} | {f"model.{f.name}" for f in fields(ModelConfig)}
    known = (known | {"batch", "vocabulary_multiple"}) - {"data"}  # which is the ladder's
    for name in changes:
        if name not in known:
            raise UserError(f"{source} changes {name!r}, which is no setting{nearest(name, known)}")
    for name in ("batch", "vocabulary_multiple"):
        if not (isinstance(changes.get(name, 1), int) and changes.get(name, 1) > 0):
            raise UserError(f"{source}: {name} is {changes[name]!r}, and must be a whole number of at least 1.")
    try:
        model = parse_model(str(changes["model"])) if "model" in changes else config.model
    except UserError as mistake:
        raise UserError(f"{source}: {mistake}") from mistake
    parts = {name.removeprefix("model."): value for name, value in changes.items() if name.startswith("model.")}
    if "vocabulary_multiple" in changes:
        multiple = changes["vocabulary_multiple"]
        parts["padded_vocabulary"] = -(-model.vocabulary // multiple) * multiple
    whole = {
        name: value
        for name, value in changes.items()
        if name not in ("model", "batch", "vocabulary_multiple") and not name.startswith("model.")
    }
    if "batch" in changes:
        whole |= {"micro_batch": changes["batch"], "global_batch": changes["batch"]}
    return config_from_json(config.to_json() | whole | {"model": to_json(model) | parts}, source)
