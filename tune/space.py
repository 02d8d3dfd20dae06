"""The space of a search: micro-batches, accumulations and execution knobs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from infra.errors import UserError
from infra.schema import strict
from train.config import ResolvedConfig, divisors
from train.estimate.recomputation import CHECKPOINTING_BY_TIME
from tune.knobs import NOT_SEARCHED, parse_knobs

ACCUMULATION = "accumulation"
"""Name of the accumulation among a candidate's knobs, if it is searched."""

KnobValues = tuple[tuple[str, Any], ...]
"""Values of the searched knobs, as (name, value); empty if no knob is searched."""


@strict
@dataclass(frozen=True)
class Candidate:
    """A point of the space. Its accumulation is one of its knobs, or follows from a fixed global batch."""

    micro_batch: int
    """Sequences per forward pass."""
    knobs: KnobValues = ()
    """Values of the searched knobs."""


@dataclass(frozen=True)
class Space:
    """All candidates around ``base``: each micro-batch with each combination of knobs that allows it."""

    base: ResolvedConfig
    """Resolved settings of the control."""
    micro_batches: tuple[int, ...]
    """Micro-batches to try, in ascending order."""
    combinations: tuple[KnobValues, ...]
    """Combinations of knobs to try; the first one is the control's."""
    max_global_batch: int
    """Maximum global batch in sequences."""

    @property
    def is_accumulation_searched(self) -> bool:
        """Whether the accumulation is searched, so that candidates have different global batches."""
        return ACCUMULATION in dict(self.combinations[0])

    def config(self, candidate: Candidate) -> ResolvedConfig:
        """Return the training config of ``candidate``. Raises ``UserError`` if its knobs do not allow its
        micro-batch."""
        size, batch = candidate.micro_batch, self.global_batch(candidate)
        return self.base.replace(micro_batch=size, global_batch=batch, **dict(without_accumulation(candidate.knobs)))

    def global_batch(self, candidate: Candidate) -> int:
        """Return the global batch of ``candidate`` in sequences."""
        return (
            candidate.micro_batch * dict(candidate.knobs)[ACCUMULATION]
            if self.is_accumulation_searched
            else self.base.batch.global_batch
        )

    @property
    def batch_label(self) -> str:
        """The global batch as a text, such as ``480 sequences per step``."""
        return (
            f"{'any number of' if self.is_accumulation_searched else self.base.batch.global_batch} sequences per step"
        )

    def micro_batches_for(self, knobs: KnobValues) -> list[int]:
        """Return the micro-batches that ``knobs`` allow, in ascending order."""
        return self._sizes[knobs]

    def candidates(self) -> list[Candidate]:
        """Return all candidates, combination by combination, with ascending micro-batches."""
        return [Candidate(size, knobs) for knobs, micro_batches in self._sizes.items() for size in micro_batches]

    def restrict(self, fits: Callable[[Candidate], bool]) -> "Space":
        """Return the space without micro-batches that fit with no combination; it always keeps the smallest one."""
        smallest, *larger = self.micro_batches
        micro_batches = [size for size in larger if any(fits(Candidate(size, knobs)) for knobs in self.combinations)]
        space = replace(self, micro_batches=(smallest, *micro_batches))
        return replace(space, combinations=tuple(c for c in space.combinations if space.micro_batches_for(c)))

    @cached_property
    def control(self) -> Candidate:
        """The reference of the search: the base's settings, with the nearest smaller micro-batch if necessary."""
        knobs = self.combinations[0]
        micro_batches = self.micro_batches_for(knobs)
        return Candidate(
            max((size for size in micro_batches if size <= self.base.batch.micro_batch), default=micro_batches[0]),
            knobs,
        )

    def knobs_label(self, knobs: Iterable[tuple[str, Any]]) -> str:
        """Format the knobs that differ from the control's, as ``checkpointing=full``; a star marks changed numerics."""
        control = dict(self.combinations[0])
        return " ".join(f"{n}={v}{'*' * changes_numerics(n, v, control[n])}" for n, v in knobs if v != control[n])

    def short_label(self, candidate: Candidate) -> str:
        """Format a short label for charts and runs, with the accumulation: ``8 x 4 compile=off``."""
        size = f"{candidate.micro_batch} x {self.config(candidate).batch.accumulation}"
        return f"{size} {self.knobs_label(without_accumulation(candidate.knobs))}".strip()

    def long_label(self, candidate: Candidate) -> str:
        """Format a long label for reports, with the accumulation: ``micro-batch 8 x 4, checkpointing=full``."""
        size = f"micro-batch {candidate.micro_batch} x {self.config(candidate).batch.accumulation}"
        return ", ".join(filter(None, (size, self.knobs_label(without_accumulation(candidate.knobs)))))

    def neighbors(self, knobs: KnobValues) -> list[KnobValues]:
        """Return the combinations that differ from ``knobs`` in one knob."""
        return [c for c in self.combinations if sum(a != b for a, b in zip(c, knobs, strict=True)) == 1]

    @cached_property
    def _sizes(self) -> dict[KnobValues, list[int]]:
        return {c: [s for s in self.micro_batches if self._is_possible(Candidate(s, c))] for c in self.combinations}

    def _is_possible(self, candidate: Candidate) -> bool:
        try:
            self.config(candidate)
            return self.global_batch(candidate) <= self.max_global_batch
        except UserError:
            return False


def without_accumulation(knobs: KnobValues) -> KnobValues:
    """Return ``knobs`` without the accumulation, which all accumulations share as the key of their fitted curves."""
    return tuple(knob for knob in knobs if knob[0] != ACCUMULATION)


def changes_numerics(name: str, value: Any, reference: Any) -> bool:
    """Return whether a knob's ``value`` rounds differently than the ``reference`` value, so that the loss may
    differ."""
    return name in ("precision", "fp8") or (name == "optimizer" and not {value, reference} <= {"adamw", "adamw-fused"})


def make_space(
    base: ResolvedConfig, knobs: Sequence[str], accumulations: Sequence[int] = (), max_global_batch: int | None = None
) -> Space:
    """Create the space around the resolved ``base``, whose combination of knobs is the first.

    Without ``accumulations`` the global batch is fixed. With them a step may have up to ``max_global_batch`` sequences,
    by default the global batch of ``base``. If they do not include the base's accumulation, the control has the first
    one.
    """
    if base.batch.workers != 1:
        raise UserError(
            f"--workers {base.batch.workers} is not supported, because a search measures one device. Use --workers 1."
        )
    values_by_knob = parse_knobs(knobs)
    if "optimizer" in values_by_knob and base.optimization.optimizer in NOT_SEARCHED:
        raise UserError(
            f"--knobs optimizer cannot be combined with --optimizer {base.optimization.optimizer}: the other "
            "optimizers change the training. Remove one of them."
        )
    axes = {name: dict.fromkeys([base.setting(name), *values]) for name, values in values_by_knob.items()}
    micro_batches = divisors(base.batch.global_batch)
    max_global_batch = (max_global_batch if accumulations else None) or base.batch.global_batch
    if accumulations:
        axes = {ACCUMULATION: sorted(accumulations, key=lambda number: number != base.batch.accumulation), **axes}
        # Multiples of 8 up to 128, of 16 up to 256, and so on.
        tiles = {number << power for power in range(3, 31) for number in range(1, 17)}
        micro_batches = [size for size in sorted({1, 2, 4, base.batch.micro_batch, *tiles}) if size <= max_global_batch]
    combinations = product(*([(name, value) for value in axes[name]] for name in axes))
    full_space = Space(base, tuple(micro_batches), tuple(combinations), max_global_batch)
    space = replace(
        full_space, combinations=tuple(c for c in full_space.combinations if full_space.micro_batches_for(c))
    )
    for number in accumulations:
        if not any((ACCUMULATION, number) in combination for combination in space.combinations):
            raise UserError(
                f"--accumulations {number} is too large, because the data have only {max_global_batch:,} sequences for "
                f"a step. Remove {number}, or tokenize more books."
            )
    for name in values_by_knob:
        for value in axes[name] if values_by_knob[name] != CHECKPOINTING_BY_TIME else ():
            if not any((name, value) in combination for combination in space.combinations):
                base.replace(**{name: value})  # This raises UserError with the reason.
    return space
