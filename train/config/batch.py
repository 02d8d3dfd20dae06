"""How the sequences of an optimizer step are divided among workers and micro-batches."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from infra.cli.units import single_value_flag
from infra.errors import UserError
from infra.schema import strict
from train.config.checks import check_part, format_flag

AUTO = -1
"""The micro-batch of a config that leaves it to be decided, written ``auto`` in flags and files."""


def _parse_micro_batch(text: str) -> int:
    if text == "auto":
        return AUTO
    if not (text.isdecimal() and int(text)):
        raise UserError(f"--micro-batch {text} must be at least 1, or auto.")
    return int(text)


MicroBatch = Annotated[
    int,
    single_value_flag("INT|auto", int, _parse_micro_batch, lambda size: "auto" if size == AUTO else str(size)),
    BeforeValidator(lambda value: AUTO if value == "auto" else value),
    PlainSerializer(lambda size: "auto" if size == AUTO else size),
]


@strict
@dataclass(frozen=True)
class BatchConfig:
    """The sequences of an optimizer step, and how they are divided."""

    global_batch: int = 480
    """Sequences per optimizer step over all workers (at least 1, a multiple of --micro-batch x --workers)."""
    micro_batch: MicroBatch = AUTO
    """Sequences per forward pass on one worker (at least 1); the accumulation follows from the global batch.
    - auto: the largest that is predicted to fit in memory; retried with the next smaller one if it does not. On a CPU
    at most 4096 tokens"""
    workers: int = 1
    """Number of data-parallel workers (at least 1); with cuda each has one GPU."""

    def __post_init__(self) -> None:
        if self.global_batch >= 2**31:  # Searching the divisors of larger numbers would take too long.
            flag = format_flag("global_batch", self.global_batch)
            raise UserError(f"{flag} is too many sequences: give less than 2^31.")
        check_part(self, global_batch=1, workers=1, **({} if self.micro_batch == AUTO else {"micro_batch": 1}))
        if self.micro_batch == AUTO and self.global_batch % self.workers:
            raise UserError(f"--global-batch {self.global_batch} is not a multiple of --workers {self.workers}.")
        if self.micro_batch != AUTO and self.global_batch % (self.micro_batch * self.workers):
            near = [m for m in divisors(self.global_batch) if self.global_batch % (m * self.workers) == 0]
            hint = f"for --micro-batch {', '.join(map(str, near))} it is" if near else "choose another --global-batch"
            raise UserError(
                f"--global-batch {self.global_batch} is not a multiple of --micro-batch {self.micro_batch} "
                f"x --workers {self.workers}; {hint}."
            )

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on each worker."""
        assert self.micro_batch != AUTO, "a resolved config has a micro-batch"
        return self.global_batch // (self.micro_batch * self.workers)


def divisors(number: int) -> list[int]:
    """The divisors of ``number`` in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
