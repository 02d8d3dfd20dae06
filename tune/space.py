"""What is searched: micro-batches, accumulations, and the execution knobs around them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from infra.errors import UserError
from infra.schema import strict
from train.config import CHOICES, TrainConfig, divisors

KNOBS = (
    "allocator", "attention", "checkpointing", "compile", "fp8", "loader_workers", "loss", "loss_chunks", "optimizer",
    "precision",
)  # fmt: skip
"""Settings of a run that leave the mathematics of a step as it is."""

NOT_SEARCHED = ("auto", "adafactor", "muon")
"""Values of them that decide nothing, and optimizers with another mathematics."""

ACCUMULATION = "accumulation"
"""Its name among a candidate's knobs where it is searched."""

Combination = tuple[tuple[str, Any], ...]
"""Values of the searched knobs, in the order of their names; empty when no knob is searched."""


@strict
@dataclass(frozen=True)
class Candidate:
    """One point of the space. The accumulation is one of the knobs, or follows from the global batch."""

    micro_batch: int
    knobs: Combination = ()


@dataclass(frozen=True)
class Space:
    """All candidates around ``base``: every micro-batch in ``sizes`` with every combination that they go with."""

    base: TrainConfig
    sizes: tuple[int, ...]
    combinations: tuple[Combination, ...]
    largest: int
    """Sequences that a step may have."""

    @property
    def free(self) -> bool:
        """Whether the accumulation is searched, so that candidates have different global batches."""
        return ACCUMULATION in dict(self.combinations[0])

    def config(self, candidate: Candidate) -> TrainConfig:
        """The training config of ``candidate``. Raises ``UserError`` where the knobs contradict its size."""
        size, batch = candidate.micro_batch, self.global_batch(candidate)
        return replace(self.base, micro_batch=size, global_batch=batch, **dict(settings(candidate.knobs)))

    def global_batch(self, candidate: Candidate) -> int:
        return candidate.micro_batch * dict(candidate.knobs)[ACCUMULATION] if self.free else self.base.global_batch

    @property
    def batch_label(self) -> str:
        """What a step is, in words."""
        return f"{'any number of' if self.free else self.base.global_batch} sequences per step"

    def sizes_of(self, knobs: Combination) -> list[int]:
        """Micro-batches that are possible with ``knobs``, ascending."""
        return self._sizes[knobs]

    def candidates(self) -> list[Candidate]:
        """Every candidate, combination by combination, sizes ascending."""
        return [Candidate(size, knobs) for knobs, sizes in self._sizes.items() for size in sizes]

    def within(self, fits: Callable[[Candidate], bool]) -> "Space":
        """The space without the micro-batches that fit with no combination, but for the smallest."""
        smallest, *larger = self.sizes
        sizes = [size for size in larger if any(fits(Candidate(size, knobs)) for knobs in self.combinations)]
        found = replace(self, sizes=(smallest, *sizes))
        return replace(found, combinations=tuple(c for c in found.combinations if found.sizes_of(c)))

    @cached_property
    def control(self) -> Candidate:
        """The candidate that the base config is, or is nearest to: what the search is compared with."""
        own = self.combinations[0]
        sizes = self.sizes_of(own)
        return Candidate(max((size for size in sizes if size <= self.base.micro_batch), default=sizes[0]), own)

    def knobs_label(self, knobs: Iterable[tuple[str, Any]]) -> str:
        """What differs from the control's, such as ``checkpointing=full``, with a star where the numerics change."""
        own = dict(self.combinations[0])
        return " ".join(f"{n}={v}{'*' * changes_numerics(n, v, own[n])}" for n, v in knobs if v != own[n])

    def label(self, candidate: Candidate) -> str:
        """``m8``, or ``m8x4 checkpointing=full`` where the accumulation is searched, for charts and names of runs."""
        size = f"m{candidate.micro_batch}" + (f"x{dict(candidate.knobs)[ACCUMULATION]}" if self.free else "")
        return f"{size} {self.knobs_label(settings(candidate.knobs))}".strip()

    def name(self, candidate: Candidate) -> str:
        """``micro-batch 8 x 4``, with its accumulation, or ``micro-batch 8 x 4, checkpointing=full``, for people."""
        size = f"micro-batch {candidate.micro_batch} x {self.config(candidate).accumulation}"
        return ", ".join(filter(None, (size, self.knobs_label(settings(candidate.knobs)))))

    def neighbours(self, knobs: Combination) -> list[Combination]:
        """Combinations that differ from ``knobs`` in one knob."""
        return [c for c in self.combinations if sum(a != b for a, b in zip(c, knobs, strict=True)) == 1]

    @cached_property
    def _sizes(self) -> dict[Combination, list[int]]:
        return {c: [s for s in self.sizes if self._possible(Candidate(s, c))] for c in self.combinations}

    def _possible(self, candidate: Candidate) -> bool:
        try:
            self.config(candidate)
            return self.global_batch(candidate) <= self.largest
        except UserError:
            return False


def settings(knobs: Combination) -> Combination:
    """``knobs`` without the accumulation: what candidates share whose memory and speed follow one curve."""
    return tuple(knob for knob in knobs if knob[0] != ACCUMULATION)


def changes_numerics(name: str, value: Any, own: Any) -> bool:
    """Whether ``value`` of a knob rounds otherwise than ``own``, so that the loss may differ."""
    return name in ("precision", "fp8") or (name == "optimizer" and not {value, own} <= {"adamw", "adamw-fused"})


def parse_knobs(words: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The knobs that ``words`` such as ``compile=off,whole`` name, with the values to try."""
    found: dict[str, tuple[Any, ...]] = {}
    for word in words:
        name, _, values = word.partition("=")
        name = name.replace("-", "_")
        if name not in KNOBS:
            raise UserError(f"--knobs {word}: {name!r} is not a knob; there are {', '.join(KNOBS)}.")
        if name in found:
            raise UserError(f"--knobs names {name} twice: give all its values at once, as in {name}=A,B.")
        found[name] = tuple(_value(name, text) for text in values.split(","))
    return found


def _value(name: str, text: str) -> Any:
    kind = TrainConfig.__annotations__[name]
    if kind is int and text.isdecimal():
        return int(text)
    choices = {value: value for value in CHOICES.get(name, ()) if value not in NOT_SEARCHED}
    known: dict[str, Any] = {"true": True, "false": False} if kind is bool else choices
    if text not in known:
        raise UserError(f"--knobs: {text!r} is not a value of {name} to try: {', '.join(known) or 'whole numbers'}.")
    return known[text]


def make_space(
    base: TrainConfig, knobs: Sequence[str], accumulations: Sequence[int] = (), largest: int | None = None
) -> Space:
    """The space around ``base``; its own combination comes first, so that ties of order favour the control.

    ``base`` is resolved. With ``accumulations`` a step may have up to ``largest`` sequences, by default as many as the
    base's; where none of them is its own, the control has the first. Without, its global batch is fixed.
    """
    if base.workers != 1:
        raise UserError(f"--workers {base.workers}: a search measures one device; leave --workers at 1.")
    searched = parse_knobs(knobs)
    if "optimizer" in searched and base.optimizer in NOT_SEARCHED:
        raise UserError(f"--knobs optimizer: another optimizer than --optimizer {base.optimizer} is another training.")
    axes = {name: dict.fromkeys([getattr(base, name), *values]) for name, values in searched.items()}
    sizes = divisors(base.global_batch)
    largest = (largest if accumulations else None) or base.global_batch
    if accumulations:
        axes = {ACCUMULATION: sorted(accumulations, key=lambda number: number != base.accumulation), **axes}
        tiles = {number << power for power in range(3, 31) for number in range(1, 17)}  # by 8 to 128, by 16 to 256 ...
        sizes = [size for size in sorted({1, 2, 4, base.micro_batch, *tiles}) if size <= largest]
    combinations = product(*([(name, value) for value in axes[name]] for name in axes))
    every = Space(base, tuple(sizes), tuple(combinations), largest)
    found = replace(every, combinations=tuple(c for c in every.combinations if every.sizes_of(c)))
    for number in accumulations:
        if not any((ACCUMULATION, number) in combination for combination in found.combinations):
            raise UserError(f"--accumulations {number}: the data have {largest:,} sequences for a step; leave it out.")
    for name in searched:
        for value in axes[name]:
            if not any((name, value) in combination for combination in found.combinations):
                replace(base, **{name: value})  # which raises the reason
    return found
