"""Settings of the length of a run and of its cycles."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from infra.cli.units import SecondsOrNone, single_value_flag
from infra.errors import UserError
from infra.schema import strict
from train.config.checks import check_part, format_flag

MAX_CYCLE_STEPS = 10_000_000
"""Maximum number of steps of a cycle, whose losses stay on the device until the cycle ends."""


@dataclass(frozen=True)
class Cycle:
    """The unit that a run repeats: training steps, then validation batches, then a report.

    Every validation uses the same held-out windows. If there are fewer than ``val_batches`` batches need, it uses all.
    """

    train_steps: int = 200
    """Training steps per cycle."""
    val_batches: int = 20
    """Validation batches per cycle (0: no validation)."""

    @classmethod
    def parse(cls, text: str) -> "Cycle":
        """Parse ``200+20``. Raises ``UserError`` if ``text`` is not a valid cycle."""
        train, plus, val = text.partition("+")
        if not (plus and train.isdecimal() and val.isdecimal() and int(train) > 0):
            raise UserError(
                f"--cycle {text!r} is not N+M, the training steps and validation batches of a cycle. Use a value such "
                "as 200+20."
            )
        if max(int(train), int(val)) > MAX_CYCLE_STEPS:
            raise UserError(f"--cycle {text} is too long. Use numbers of at most {MAX_CYCLE_STEPS:,}.")
        return cls(int(train), int(val))

    def __str__(self) -> str:
        return f"{self.train_steps}+{self.val_batches}"


CycleText = Annotated[
    Cycle,
    single_value_flag("N+M", Cycle, Cycle.parse, str),
    BeforeValidator(lambda text: Cycle.parse(str(text))),
    PlainSerializer(str),
]


@strict
@dataclass(frozen=True)
class DurationConfig:
    """Settings of the length of a run, and of its cycles."""

    steps: int | None = None
    """Number of optimizer steps (at least 1). By default, without --tokens and --time-budget too, one epoch."""
    tokens: int | None = None
    """Number of training tokens (at least those of one step)."""
    time_budget: SecondsOrNone = None
    """Training time (above 0), such as 90s, 5m or 1h. It starts after the first step, which compiles."""
    speed_tolerance: float | None = None
    """Relative half-width of the speed's confidence sequence at which the run ends early (between 0 and 1; such as
    0.005). By default the speed does not end the run."""
    max_loss_spike: float = 3.0
    """Increase of a step's loss over the mean of the previous cycle, in nats, at which the run stops (0: off).
    A loss of NaN always stops the run."""
    cycle: CycleText = Cycle()
    """Training steps (at least 1), then validation batches, between two reports.
    Every validation uses the same held-out windows, and all of them if they are fewer."""

    def __post_init__(self) -> None:
        check_part(self, max_loss_spike=0)
        if self.speed_tolerance is not None and not 0 < self.speed_tolerance < 1:
            flag = format_flag("speed_tolerance", self.speed_tolerance)
            raise UserError(f"{flag} must be a fraction between 0 and 1.")
        if len(self.ends) > 1:
            first, second = (f"--{name.replace('_', '-')}" for name in self.ends[:2])
            raise UserError(f"{first} and {second} both set the length of the run. Use only one of them.")
        if self.time_budget is not None and not 0 < self.time_budget < math.inf:
            raise UserError(f"--time-budget {self.time_budget}s must be above 0.")
        if self.steps is not None and self.steps < 1:
            raise UserError(f"--steps {self.steps} must be at least 1.")

    @property
    def ends(self) -> list[str]:
        """The settings that set the length of the run; at most one."""
        return [name for name in ("steps", "tokens", "time_budget") if getattr(self, name) is not None]
