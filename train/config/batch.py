"""How the sequences of an optimizer step are divided among workers and micro-batches."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import PlainValidator

from infra.cli.units import single_value_flag
from infra.errors import UserError
from infra.schema import strict
from train.config.checks import check_part, format_flag

AUTO: Final = "auto"
"""The value of a setting that is chosen automatically."""


def _parse_micro_batch(text: str) -> int | Literal["auto"]:
    if text == AUTO:
        return AUTO
    if not (text.isdecimal() and int(text)):
        raise UserError(f"--micro-batch {text} must be at least 1, or auto.")
    return int(text)


def _check_micro_batch(value: Any) -> int | Literal["auto"]:
    if value != AUTO and type(value) is not int:
        raise ValueError(f"micro_batch is {value!r}; it should be an integer, or {AUTO!r}.")
    return value


MicroBatch = Annotated[
    int | Literal["auto"],
    single_value_flag("INT|auto", (int, str), _parse_micro_batch, str),
    PlainValidator(_check_micro_batch),
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
            raise UserError(f"{flag} is too large. Use fewer than 2^31 sequences.")
        check_part(self, global_batch=1, workers=1, **({} if self.micro_batch == AUTO else {"micro_batch": 1}))
        if self.micro_batch == AUTO and self.global_batch % self.workers:
            flags = f"--global-batch {self.global_batch} is not a multiple of --workers {self.workers}"
            raise UserError(f"{flags}. Use a multiple, or other --workers.")
        if self.micro_batch != AUTO and self.global_batch % (self.micro_batch * self.workers):
            sizes = [m for m in divisors(self.global_batch) if self.global_batch % (m * self.workers) == 0]
            valid = f"--micro-batch {_alternatives(sizes)}" if sizes else "another --global-batch"
            raise UserError(
                f"--global-batch {self.global_batch} is not a multiple of --micro-batch {self.micro_batch} "
                f"x --workers {self.workers}. Use {valid}."
            )


def _alternatives(values: list[int]) -> str:
    """Format ``1, 2 or 4``."""
    *head, tail = map(str, values)
    return f"{', '.join(head)} or {tail}" if head else tail


@strict
@dataclass(frozen=True)
class Batch(BatchConfig):
    """The resolved division of an optimizer step's sequences, with an integer as micro-batch."""

    micro_batch: int = 1
    """Sequences per forward pass on one worker."""

    def __post_init__(self) -> None:
        assert self.micro_batch != AUTO, "a resolved batch has an integer as micro-batch"
        super().__post_init__()

    @property
    def accumulation(self) -> int:
        """Micro-batches per optimizer step on each worker."""
        return self.global_batch // (self.micro_batch * self.workers)


def divisors(number: int) -> list[int]:
    """Return the divisors of ``number`` in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
