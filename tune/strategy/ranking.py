"""Who won: candidates ranked by confirmed speed, ties named, the smaller memory winning among equals.

Every number comes from runs in fresh processes, interleaved where they were confirmed, so that a drift of the machine
falls on all alike.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from train.intervals import Estimate
from tune.space import Candidate
from tune.trial.row import TrialRow

CONTENDERS = 3
NEGLIGIBLE = 0.005
"""Loss of speed, as a fraction, that a smaller memory is worth when no difference has been shown."""
CLEAR = 0.001
"""Expected loss, as a fraction, below which a candidate counts as beaten without another run."""
NORMAL = statistics.NormalDist()
Z95 = NORMAL.inv_cdf(0.975)
UNFIT = ("over_limit", "oom", "thrash")


@dataclass(frozen=True)
class Ranked:
    """A candidate's place."""

    candidate: Candidate
    speed: Estimate
    """In tokens per second."""
    memory: int
    """In bytes."""
    runs: int
    confirmed: bool
    final: bool = False
    """It ran in every round of confirmations, so that it can win."""
    tied: bool = False
    """Its interval overlaps the fastest one's: no difference has been shown."""

    def loss_against(self, other: "Ranked") -> float:
        """Expected loss, as a fraction of speed, of choosing this one if ``other`` should be the faster.

        From both intervals, taken for 95% of normal distributions of the logarithm.
        """
        lead = math.log(self.speed.middle / other.speed.middle)
        error = math.hypot(*(math.log(s.speed.high / s.speed.low) / 2 / Z95 for s in (self, other)))
        if not error:
            return max(0.0, -lead)
        z = lead / error
        return error * (NORMAL.pdf(z) - z * NORMAL.cdf(-z))


def fit_to_win(rows: Sequence[TrialRow]) -> dict[Candidate, list[TrialRow]]:
    """Rows with a speed by candidate, without the candidates that ever failed to stay within the limit."""
    unfit = {row.candidate for row in rows if row.outcome in UNFIT}
    found: dict[Candidate, list[TrialRow]] = {}
    for row in rows:
        if row.outcome == "ok" and row.tokens_per_second and row.candidate not in unfit:
            found.setdefault(row.candidate, []).append(row)
    return found


def contenders(rows: Sequence[TrialRow], control: Candidate) -> list[Candidate]:
    """Who runs in the round of confirmations after ``rows``, fastest first; empty when the winner is clear.

    In the first round these are the best three of the exploration, without those that are clearly beaten. Later
    they are the winner so far and those whose expected lead over it is not negligible. The control runs in every
    round, if it fits, because the search is compared with it.
    """
    ranked = rank(rows)
    again = any(entry.confirmed for entry in ranked)
    final = [s for s in ranked if s.final]
    if not final:
        return []
    rivals = [s for s in final[1:] if final[0].loss_against(s) > (NEGLIGIBLE if again else CLEAR)]
    if again and not rivals:
        return []
    by_speed = sorted([final[0], *rivals], key=lambda s: -s.speed.middle)
    chosen = [s.candidate for s in by_speed[:CONTENDERS]]
    if control not in chosen and any(s.candidate == control for s in final):
        chosen.append(control)
    return chosen if len(chosen) > 1 else []


def rank(rows: Sequence[TrialRow]) -> list[Ranked]:
    """All candidates that can win, the winner first, then those tied with it and then the rest, by speed.

    Where anything was confirmed only candidates that ran in every round of it can win or tie, on their confirmed
    speeds: the fastest of many single measurements is partly luck, and rounds differ as the machine drifts.
    """
    found = [_pooled(runs) for runs in fit_to_win(rows).values()]
    if not found:
        return []
    most = max(s.runs if s.confirmed else 0 for s in found)
    found = [replace(s, final=not most or (s.confirmed and s.runs == most)) for s in found]
    final = [s for s in found if s.final]
    best = max(final, key=lambda s: s.speed.middle)
    tied = [s for s in final if s is best or s.speed.high >= best.speed.low]
    if len(tied) > 1:
        tied = [replace(s, tied=True) for s in tied]
    names = {s.candidate for s in tied}
    rest = [s for s in found if s.candidate not in names]
    # A tie may hide a real loss that noise did not let show, so memory decides only where the loss would be small.
    equal = [s for s in tied if s.speed.middle >= (1 - NEGLIGIBLE) * best.speed.middle]
    winner = min(equal, key=lambda s: (s.memory, -s.speed.middle))
    by_speed = sorted((s for s in tied if s is not winner), key=lambda s: -s.speed.middle)
    return [winner, *by_speed, *sorted(rest, key=lambda s: (not s.confirmed, not s.final, -s.speed.middle))]


def _pooled(runs: list[TrialRow]) -> Ranked:
    """Pool a candidate's runs: the geometric mean, as wide as their intervals or their spread."""
    confirmed = [row for row in runs if row.stage == "confirm"]
    used = confirmed or runs
    within = math.sqrt(sum(math.log(row.high / row.low) ** 2 for row in used if row.high and row.low)) / 2 / len(used)
    speeds = [row.tokens_per_second for row in used if row.tokens_per_second]
    width = math.exp(max(within, math.log(max(speeds) / min(speeds)) / 2))
    middle = statistics.geometric_mean(speeds)
    speed = Estimate(middle, middle / width, middle * width)
    memory = max(row.memory or 0 for row in runs)
    return Ranked(runs[0].candidate, speed, memory, len(used), bool(confirmed))
