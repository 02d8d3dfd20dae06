"""Rows of a search for the lowest loss whose candidates follow a law, as a strategy would have run them."""

from collections.abc import Iterable

from trial_rows import trial_row

from tune.space import Candidate
from tune.trial.row import RungLoss, Stage, TrialOutcome, TrialRow

TRAIN_TIME = 3200.0
"""Seconds of the final run."""
SPEED = 1000.0
"""Tokens per second of every candidate, unless a test has another one."""


def candidate(learning_rate: float, global_batch: int = 16) -> Candidate:
    return Candidate(4, (("learning_rate", learning_rate), ("global_batch", global_batch)))


def speed_row(who: Candidate, tokens_per_second: float = SPEED, error: float = 0.01) -> TrialRow:
    return trial_row(
        f"speed {who.knobs}", 1, "speed", 0, who, 1, "ok", "", 5.0, node="w1", name="speed", labels={"settings": "s"},
        tokens_per_second=tokens_per_second, low=(1 - error) * tokens_per_second, high=(1 + error) * tokens_per_second,
        memory=10**9,
    )  # fmt: skip


def law_loss(seconds: float, level: float, floor: float = 2.0) -> float:
    """A law with an offset: ``level`` above its ``floor`` after a hundred seconds."""
    return floor + level * (seconds / 100) ** -0.3


def learning_row(
    who: Candidate, level: float, seconds: Iterable[float] = (100, 200, 400), stage: Stage = "learn", seed: int = 0,
    outcome: TrialOutcome = "ok", reason: str = "",
) -> TrialRow:  # fmt: skip
    """A learning trial; a seed shifts all losses, as the order of its windows does."""
    shift = (0.0, 0.004, -0.004)[seed]
    rungs = [RungLoss(time, int(time * SPEED), law_loss(time, level) + shift) for time in seconds]
    return trial_row(
        f"{stage} {seed} {who.knobs}", 2, stage, seed, who, 1, outcome, reason, 60.0, node="w1",
        name=" ".join(f"{name}={value:g}" for name, value in who.knobs), rungs=rungs, memory=10**9,
    )  # fmt: skip


def final_rows(who: Candidate, level: float) -> list[TrialRow]:
    """The rows of a finalist with three seeds, of which the first continues the exploration."""
    times = ((100, 200, 400, 800, 1600), (400, 800, 1600), (400, 800, 1600))
    return [learning_row(who, level, times[seed], "final", seed) for seed in range(3)]
