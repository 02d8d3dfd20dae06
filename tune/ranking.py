"""Who won: candidates ranked by confirmed speed, ties named, the smaller memory first among them.

In: rows. Out: standings, and the contenders that are worth confirming. Every number of a standing comes
from runs in fresh processes, interleaved where they were confirmed, so that a drift of the machine
falls on all alike.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tune.record import Row
from tune.space import Candidate

CONTENDERS = 3
NEGLIGIBLE = 0.005
"""Loss of speed, as a fraction, that a smaller memory is worth when no difference has been shown."""
UNFIT = ("over_limit", "oom", "thrash")


@dataclass(frozen=True)
class Standing:
    """A candidate's place. Speeds in tokens per second, memory in bytes."""

    candidate: Candidate
    tokens_per_second: float
    low: float
    high: float
    memory: int
    runs: int
    confirmed: bool
    tied: bool = False
    """Its interval overlaps the fastest one's: no difference has been shown."""


def fit_to_win(rows: Sequence[Row]) -> dict[Candidate, list[Row]]:
    """Rows with a speed by candidate, without the candidates that ever failed to stay within the limit."""
    unfit = {row.candidate for row in rows if row.outcome in UNFIT}
    found: dict[Candidate, list[Row]] = {}
    for row in rows:
        if row.outcome == "ok" and row.tokens_per_second and row.candidate not in unfit:
            found.setdefault(row.candidate, []).append(row)
    return found


def contenders(rows: Sequence[Row], control: Candidate) -> list[Candidate]:
    """The fastest three of the exploration, and the control where it ran within the limit."""
    explored = fit_to_win([row for row in rows if row.stage != "confirm"])
    ordered = sorted(explored, key=lambda candidate: -_speed(explored[candidate]))
    chosen = ordered[:CONTENDERS]
    if control in explored and control not in chosen:
        chosen.append(control)
    return chosen


def standings(rows: Sequence[Row]) -> list[Standing]:
    """All candidates that can win, the winner first, then those tied with it by memory, then the rest by speed.

    Where anything was confirmed only confirmed candidates can win or tie, on their confirmed speeds: the
    fastest of many single measurements is partly luck.
    """
    found = [_standing(runs) for runs in fit_to_win(rows).values()]
    if not found:
        return []
    final = [s for s in found if s.confirmed] or found
    best = max(final, key=lambda s: s.tokens_per_second)
    tied = [s for s in final if s is best or s.high >= best.low]
    if len(tied) > 1:
        tied = [replace(s, tied=True) for s in tied]
    names = {s.candidate for s in tied}
    rest = [s for s in found if s.candidate not in names]
    # A tie may hide a real loss that noise did not let show, so memory decides only where the loss would be small.
    equal = [s for s in tied if s.tokens_per_second >= (1 - NEGLIGIBLE) * best.tokens_per_second]
    winner = min(equal, key=lambda s: (s.memory, -s.tokens_per_second))
    by_speed = sorted((s for s in tied if s is not winner), key=lambda s: -s.tokens_per_second)
    return [winner, *by_speed, *sorted(rest, key=lambda s: (not s.confirmed, -s.tokens_per_second))]


def _standing(runs: list[Row]) -> Standing:
    """Pool a candidate's runs: the geometric mean, as wide as their intervals or their spread."""
    confirmed = [row for row in runs if row.stage == "confirm"]
    used = confirmed or runs
    within = math.sqrt(sum(math.log(row.high / row.low) ** 2 for row in used if row.high and row.low)) / 2 / len(used)
    speeds = [row.tokens_per_second for row in used if row.tokens_per_second]
    width = math.exp(max(within, math.log(max(speeds) / min(speeds)) / 2))
    return Standing(
        runs[0].candidate, _speed(used), _speed(used) / width, _speed(used) * width,
        memory=max(row.memory or 0 for row in runs), runs=len(used), confirmed=bool(confirmed),
    )  # fmt: skip


def _speed(runs: Sequence[Row]) -> float:
    return statistics.geometric_mean(row.tokens_per_second for row in runs if row.tokens_per_second)
