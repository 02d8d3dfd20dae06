"""Settings of the length of a run and of its cycles."""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator, PlainSerializer

from infra.cli.units import SecondsOrNone, format_duration, parse_duration, single_value_flag
from infra.errors import UserError
from infra.schema import strict
from train.config.checks import check_part, format_flag

MAX_CYCLE_STEPS = 10_000_000
"""Maximum number of steps of a cycle, whose losses stay on the device until the cycle ends."""


CYCLE_SECONDS = 20.0
"""Training time of a cycle by default, so that a report follows every 10 to 30 s unless a step takes longer."""

MAX_VAL_BATCHES = 20
"""Maximum number of validation batches per cycle that is chosen automatically; more would hardly be more precise."""


@dataclass(frozen=True)
class Cycle:
    """The unit that a run repeats: training, then validation, then a report.

    All validations of a run use the same held-out windows. If there are fewer than ``val_batches`` batches need, they
    use all.
    """

    train_steps: int | None = None
    """Training steps per cycle; None: those that take about ``seconds``."""
    val_batches: int | None = None
    """Validation batches per cycle (0: no validation); None: those that take at most a tenth of the training time."""
    seconds: float = CYCLE_SECONDS
    """Training time of a cycle without a number of ``train_steps``."""

    @classmethod
    def parse(cls, text: str) -> "Cycle":
        """Parse ``20s``, ``20s+5``, ``200`` or ``200+20``. Raises ``UserError`` if ``text`` is not a valid cycle."""
        train, plus, val = text.strip().partition("+")
        if plus and not val.isdecimal():
            raise UserError(f"--cycle {text!r} does not end with a number of validation batches. Use {_EXAMPLES}.")
        val_batches = int(val) if plus else None
        if train.isdecimal() and int(train) > 0:
            cycle = cls(int(train), val_batches)
        else:
            try:
                seconds = parse_duration(train)
            except ValueError:
                raise UserError(f"--cycle {text!r} is not a time or a number of steps. Use {_EXAMPLES}.") from None
            cycle = cls(None, val_batches, parse_duration(format_duration(seconds)))  # as a file stores it
        if max(cycle.train_steps or 0, cycle.val_batches or 0) > MAX_CYCLE_STEPS:
            raise UserError(f"--cycle {text} is too long. Use numbers of at most {MAX_CYCLE_STEPS:,}.")
        return cycle

    def __str__(self) -> str:
        return self.train_part if self.val_batches is None else f"{self.train_part}+{self.val_batches}"

    @property
    def train_part(self) -> str:
        """The length of the cycle's training as text: a number of steps, or a time."""
        return format_duration(self.seconds) if self.train_steps is None else str(self.train_steps)

    @property
    def validates(self) -> bool:
        """Whether a cycle ends with a validation."""
        return self.val_batches != 0

    @property
    def max_val_batches(self) -> int:
        """The maximum number of validation batches per cycle."""
        return MAX_VAL_BATCHES if self.val_batches is None else self.val_batches

    def last_step(self, step: int) -> int | None:
        """Return the last step of the cycle that begins after ``step``; None if that depends on the time.

        Cycles with a number of steps end at its multiples, wherever a run was interrupted, so that a resumed run
        reports the same as an uninterrupted one.
        """
        return None if self.train_steps is None else (step // self.train_steps + 1) * self.train_steps


_EXAMPLES = "a time such as 20s, or steps and validation batches such as 200+20"

CycleText = Annotated[
    Cycle,
    single_value_flag("DURATION|N+M", Cycle, Cycle.parse, str),
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
    """Time of the run after its first step, which compiles (above 0), such as 90s, 5m or 1h.
    It includes training, validation, checkpoints and the end of the run."""
    speed_tolerance: float | None = None
    """Relative half-width of the speed's confidence sequence at which the run ends early (between 0 and 1; such as
    0.005). By default the speed does not end the run."""
    max_loss_spike: float = 3.0
    """Increase of a step's loss over the mean of the previous cycle, in nats, at which the run stops (0: off).
    A loss of NaN always stops the run."""
    cycle: CycleText = Cycle()
    """Training and validation between two reports: a time, such as 20s or 5m, or a number of steps, such as 200.
    Validation takes at most a tenth of the training time, unless +M sets its number of batches, as in 200+20 or 20s+5
    (+0: none). Every validation uses the same held-out windows, and all of them if they are fewer."""

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
