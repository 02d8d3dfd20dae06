"""Published figures to which ladders are compared, by suite and rung, as their sources give them.

Four studies are repeated by suites: GPT-2 124M on an A100 (``a100``), a training loop (``loop``), its accumulation
(``accumulation``), and techniques that save memory (``memory``). Other suites are compared with figures of these
studies and of published reports that have the same change. A figure that was not published is None.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """The results of one rung of the study of GPT-2 on an A100."""

    batch: int
    """Micro-batch in sequences."""
    gib: float
    """GPU memory in GiB. The study calls the unit GB, but a textbook loop needs this many GiB."""
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
"""The results of the study of GPT-2 by the rung's name in the suite ``a100``."""

VALIDATION = 11 / (10 + 1 / 3)
"""Factor by which validation increases the study's tokens/s: one batch in eleven, which takes a third of a step."""

LOGGED_LOSSES = (7.042, 6.927)
"""Training and validation loss in nats/token, the only ones in the log of the study of GPT-2."""
LOGGED_LOSS_BATCH = 64
"""Micro-batch of the rung with :data:`LOGGED_LOSSES`, in sequences."""
LOGGED_LOSS_TOKENS = 7_208_960
"""Tokens after which the study logged :data:`LOGGED_LOSSES`: 220 batches of 64 sequences of 512 tokens."""


@dataclass(frozen=True)
class Effect:
    """Effect of a change on memory and step time, as ratios to the values without the change."""

    memory: float | None = None
    """Ratio of memory; None if it was not published."""
    time: float | None = None
    """Ratio of the time per token; None if it was not published."""


@dataclass(frozen=True)
class EffectStudy:
    """Published effects of the rungs of a suite, each over the rung that the suite compares it with.

    This is the previous rung in a cumulative suite, and the baseline in other suites.
    """

    effects: Mapping[str, Effect]
    """Effects by the name of the rung."""
    source: str
    """What was measured, and where it differs from the suite, as sentences."""


def _study_time(name: str, reference: str) -> float:
    return STUDY[reference].speed / STUDY[name].speed


EFFECT_STUDIES: Mapping[str, EffectStudy] = {
    "loop": EffectStudy(
        {
            "accumulation": Effect(memory=1.11 / 2.5),  # The study published the memory in GB.
            "checkpointing": Effect(memory=0.5, time=1.25),
            "asynchronous copies": Effect(time=0.75),
            "compile": Effect(time=0.5),
            "max-autotune": Effect(time=120 / 800),  # The study published the milliseconds.
        },
        "The study trained a model with 4 blocks and a width of 256 at a context length of 512, as this suite does on "
        "data with 512 token ids. It measured each change of the loop together with the previous ones: max-autotune "
        "takes x0.15 of the time of the loop before compile, and x0.30 of the compiled loop.",
    ),
    "accumulation": EffectStudy(
        {
            "4 accumulated": Effect(memory=1.11 / 2.5),
            "asynchronous copies": Effect(time=0.75),
            "compile": Effect(time=0.5),
            "max-autotune": Effect(time=0.3),
        },
        "The study trained a model with 4 blocks and a width of 256 at a context length of 512, as this suite does on "
        "data with 512 token ids.",
    ),
    "memory": EffectStudy(
        {
            "accumulation": Effect(memory=0.58),
            "accumulation, checkpointing": Effect(),
            "fp16": Effect(memory=0.93, time=0.47),
            "accumulation, checkpointing, fp16": Effect(),
            "Adafactor": Effect(memory=0.82),
            "accumulation, checkpointing, fp16, Adafactor": Effect(memory=5 / 15, time=1.0),
            "8-bit AdamW": Effect(memory=0.88),
            "accumulation, checkpointing, fp16, 8-bit AdamW": Effect(memory=5 / 15, time=1.0),
        },
        "The study trained BERT-large on a V100, and measured the memory by NVML. Of the two combinations with an "
        "optimizer it published 15 GB that become 5 GB at equal speed.",
    ),
    "kernels": EffectStudy(
        {"max-autotune": Effect(time=0.98)},
        "Reports of training GPT-2 124M name this effect of max-autotune without CUDA graphs. The other rungs have no "
        "published figures.",
    ),
    "loader": EffectStudy(
        {"1 thread": Effect(memory=1.0, time=_study_time("data-loading workers", "tied weights"))},
        "The study of the suite a100 (GPT-2 124M on an A100) measured data-loading workers as its last rung.",
    ),
    "precision": EffectStudy(
        {
            "TF32": Effect(memory=1.0, time=_study_time("tensor cores", "baseline")),
            "fp16": Effect(memory=32.4 / 37.0),
            "8-bit AdamW": Effect(memory=0.88),
        },
        "TF32 and fp16 are from the study of the suite a100 (GPT-2 124M on an A100, attention without a fused kernel), "
        "8-bit AdamW from the study of the suite memory (BERT-large on a V100).",
    ),
    "sizes": EffectStudy(
        {"vocabulary not padded": Effect(memory=1.0, time=_study_time("flash attention", "padded vocabulary"))},
        "The study of the suite a100 (GPT-2 124M on an A100) padded the vocabulary to 50,304 ids at a batch of 64.",
    ),
    "aa": EffectStudy({}, "Identical runs need no study: their ratio is x1.00, and at most 5% are judged different."),
}
"""Published effects by suite."""
