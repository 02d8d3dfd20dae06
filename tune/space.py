"""What is searched: the factor pairs of the global batch, and the execution knobs around them.

In: a training config, whose mathematics is fixed, and the names of knobs. Out: candidates, each of
which is a training config that computes the same steps in another way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from infra.errors import UserError
from infra.schema import strict
from train.config import TrainConfig, divisors

KNOBS: dict[str, tuple[Any, ...]] = {
    "checkpointing": ("none", "selective", "full"),
    "loss_chunks": (1, 8),
    "compile": ("off", "blocks", "whole", "max-autotune", "reduce-overhead"),
    "attention": ("auto", "flash", "cudnn", "efficient", "manual"),
    "precision": ("fp32", "tf32", "bf16", "bf16-activations"),
    "optimizer": ("adamw-fused", "adamw"),
    "loader_workers": (0, 1),
}
"""Settings of a run that change how a step is executed; precision alone also changes its rounding."""

ON_CPU: dict[str, tuple[Any, ...]] = {
    "compile": ("off", "blocks", "whole"),
    "attention": ("sdpa", "manual"),
    "precision": ("fp32",),
}
"""What is left of them there: one fused kernel of attention, no CUDA graphs, tf32 is fp32, and bf16 is emulated."""

Combination = tuple[tuple[str, Any], ...]
"""Values of the searched knobs, in the order of their names; empty when no knob is searched."""


@strict
@dataclass(frozen=True)
class Candidate:
    """One point of the space. The accumulation follows from the global batch."""

    micro_batch: int
    knobs: Combination = ()


@dataclass(frozen=True)
class Space:
    """All candidates around ``base``: every micro-batch in ``sizes`` with every combination of knobs."""

    base: TrainConfig
    sizes: tuple[int, ...]
    combinations: tuple[Combination, ...]
    free: bool = False
    """A step is one micro-batch, whatever its size: candidates do not compute the same training."""

    def config(self, candidate: Candidate) -> TrainConfig:
        """The training config of ``candidate``. Raises ``UserError`` where the knobs contradict its size."""
        size = candidate.micro_batch
        batch = size if self.free else self.base.global_batch
        return replace(self.base, micro_batch=size, global_batch=batch, **dict(candidate.knobs))

    @property
    def batch_label(self) -> str:
        """What a step is, in words."""
        return "a free number of sequences per step" if self.free else f"{self.base.global_batch} sequences per step"

    def sizes_of(self, knobs: Combination) -> list[int]:
        """Micro-batches that are possible with ``knobs``, ascending."""
        return self._sizes[knobs]

    def candidates(self) -> list[Candidate]:
        """Every candidate, combination by combination, sizes ascending."""
        return [Candidate(size, knobs) for knobs, sizes in self._sizes.items() for size in sizes]

    @property
    def control(self) -> Candidate:
        """The candidate that the base config is: what the search is compared with."""
        return Candidate(self.base.micro_batch, self.combinations[0])

    def knobs_label(self, knobs: Combination) -> str:
        """The settings that differ from the control's, such as ``checkpointing=full``; nothing where none does."""
        own = self.combinations[0]
        return " ".join(f"{n}={v}" for (n, v), control in zip(knobs, own, strict=True) if (n, v) != control)

    def label(self, candidate: Candidate) -> str:
        """``m8``, or ``m8 checkpointing=full``, for charts and names of runs."""
        return f"m{candidate.micro_batch} {self.knobs_label(candidate.knobs)}".strip()

    def name(self, candidate: Candidate) -> str:
        """``micro-batch 8 x 4``, with its accumulation, or ``micro-batch 8 x 4, checkpointing=full``, for people."""
        size = f"micro-batch {candidate.micro_batch} x {self.config(candidate).accumulation}"
        return ", ".join(filter(None, (size, self.knobs_label(candidate.knobs))))

    def neighbours(self, knobs: Combination) -> list[Combination]:
        """Combinations that differ from ``knobs`` in one knob."""
        return [c for c in self.combinations if sum(a != b for a, b in zip(c, knobs, strict=True)) == 1]

    @cached_property
    def _sizes(self) -> dict[Combination, list[int]]:
        return {c: [s for s in self.sizes if self._possible(Candidate(s, c))] for c in self.combinations}

    def _possible(self, candidate: Candidate) -> bool:
        try:
            self.config(candidate)
        except UserError:
            return False
        return True


def parse_knobs(words: Sequence[str]) -> tuple[str, ...]:
    """The knobs that ``words`` name, each once; ``all`` among them means all. Raises ``UserError``."""
    if "all" in words:
        return tuple(KNOBS)
    names = tuple(dict.fromkeys(word.replace("-", "_") for word in words))
    unknown = [name for name in names if name not in KNOBS]
    if unknown:
        raise UserError(f"--knobs: {unknown[0]!r} is not a knob; there are {', '.join(KNOBS)}, or all.")
    return names


def make_space(base: TrainConfig, knobs: Sequence[str], *, free: bool = False) -> Space:
    """The space around ``base``; its own combination comes first, so that ties of order favour the control.

    ``base`` is resolved: its device decides which settings exist. With ``free`` the global batch is
    the largest size, and no longer fixed. Raises ``UserError``.
    """
    if base.workers != 1:
        raise UserError(f"--workers {base.workers}: a search measures one device; leave --workers at 1.")
    combinations: list[Combination] = [()]
    for name in knobs:
        own = getattr(base, name)
        there = ON_CPU.get(name, KNOBS[name]) if base.device == "cpu" else KNOBS[name]
        combinations = [(*chosen, (name, value)) for chosen in combinations for value in dict.fromkeys([own, *there])]
    largest = base.global_batch
    free_sizes = {1, 2, 4, base.micro_batch, *range(8, largest + 1, 8)}
    sizes = sorted(size for size in free_sizes if size <= largest) if free else divisors(largest)
    every = Space(base, tuple(sizes), tuple(combinations), free)
    return replace(every, combinations=tuple(c for c in combinations if every.sizes_of(c)))
